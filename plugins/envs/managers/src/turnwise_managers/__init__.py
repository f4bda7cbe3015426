"""Hooks of turnwise-managers: trajectory and stepwise environment managers."""
