"""Hooks of turnwise-console: metrics and progress in the terminal (rich)."""
