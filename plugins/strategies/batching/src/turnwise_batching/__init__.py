"""Hooks of turnwise-batching: batch-adjust policies: how the rows of a step become optimizer updates."""
