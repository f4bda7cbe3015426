"""Hooks of turnwise-losses: policy losses in torch."""
