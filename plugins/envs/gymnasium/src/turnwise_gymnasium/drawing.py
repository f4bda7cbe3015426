"""A picture of the lake, drawn with numpy alone."""

from __future__ import annotations

import numpy as np

from turnwise_gymnasium.levels import Level

# Pixels. What is drawn in a tile below is laid out for this size.
TILE = 32
_ICE, _LINE, _HOLE, _START = (214, 236, 248), (160, 196, 216), (24, 44, 84), (240, 230, 190)
_POLE, _FLAG, _PLAYER, _SUNK = (96, 72, 48), (40, 150, 70), (214, 70, 50), (120, 60, 90)
# Made once: a frame is drawn at every turn of an episode that is recorded.
_Y, _X = np.mgrid[0:TILE, 0:TILE]
_RADIUS = np.hypot(_Y - (TILE - 1) / 2, _X - (TILE - 1) / 2)


def draw_lake(level: Level, at: int) -> np.ndarray:
    """uint8 [32·size, 32·size, 3]: holes are dark discs, the goal a green flag, the player a red disc (violet in a
    hole)."""
    picture = np.empty((level.size * TILE, level.size * TILE, 3), np.uint8)
    for cell, letter in enumerate(level.cells):
        top, left = (TILE * part for part in divmod(cell, level.size))
        tile = picture[top : top + TILE, left : left + TILE]
        tile[:] = _START if letter == "S" else _ICE
        tile[0], tile[:, 0] = _LINE, _LINE
        if letter == "H":
            tile[_RADIUS < TILE * 0.42] = _HOLE
        if letter == "G":
            tile[4:-3, 8:11] = _POLE
            tile[(_X >= 11) & (_Y >= 4) & (_Y <= 18) & (15 - 2 * np.abs(_Y - 11) >= _X - 11)] = _FLAG
        if cell == at:
            tile[_RADIUS < TILE * 0.25] = _SUNK if letter == "H" else _PLAYER
    return picture
