"""Hooks of turnwise-sokoban: procedurally generated, always solvable Sokoban rooms."""
