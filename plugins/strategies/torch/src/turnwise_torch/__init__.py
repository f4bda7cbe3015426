"""Hooks of turnwise-torch: single-process training with PyTorch, and what torch strategies share."""
