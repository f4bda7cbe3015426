"""Hooks of turnwise-jsonl: metrics and full trajectories as JSON lines."""
