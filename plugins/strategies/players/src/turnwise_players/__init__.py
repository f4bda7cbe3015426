"""Hooks of turnwise-players: the random player and the human at the keyboard."""
