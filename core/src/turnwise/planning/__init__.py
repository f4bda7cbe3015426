"""What can be known before a start: what is wrong or missing, what the run will need, its batches, updates and rates;
and what the run asks of it."""
