"""The field's keys: what is translated, what does not apply, and why."""
