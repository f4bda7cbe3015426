"""Hooks of turnwise-gymnasium: FrozenLake as text, and a bridge to any Gymnasium environment of discrete actions."""
