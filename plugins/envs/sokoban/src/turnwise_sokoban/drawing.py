"""A picture of the room, drawn with numpy alone."""

from __future__ import annotations

import numpy as np

from turnwise_sokoban.rooms import BOX, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET, TARGET, WALL

# Pixels. What is drawn in a tile below is laid out for this size.
TILE = 32
_BRICK, _MORTAR, _FLOOR, _TARGET = (122, 84, 66), (84, 58, 46), (238, 228, 204), (206, 76, 64)
_BOX, _DONE, _EDGE, _PLAYER = (206, 150, 76), (104, 166, 84), (92, 62, 34), (58, 104, 184)
# Made once: a frame is drawn at every turn of an episode that is recorded.
_Y, _X = np.mgrid[0:TILE, 0:TILE]
_RADIUS = np.hypot(_Y - (TILE - 1) / 2, _X - (TILE - 1) / 2)


def draw_room(shown: list[int], width: int) -> np.ndarray:
    """uint8 [32·height, 32·width, 3] of the codes in reading order: targets are red rings, boxes brown (green on a
    target), the player blue."""
    picture = np.empty((len(shown) // width * TILE, width * TILE, 3), np.uint8)
    for cell, code in enumerate(shown):
        top, left = (TILE * part for part in divmod(cell, width))
        tile = picture[top : top + TILE, left : left + TILE]
        tile[:] = _BRICK if code == WALL else _FLOOR
        if code == WALL:
            tile[::8] = _MORTAR
            tile[:8, 0] = tile[8:16, 16] = tile[16:24, 0] = tile[24:, 16] = _MORTAR
        if code in (TARGET, PLAYER_ON_TARGET):
            tile[(_RADIUS < TILE * 0.42) & (_RADIUS > TILE * 0.32)] = _TARGET
        if code in (BOX, BOX_ON_TARGET):
            tile[3:-3, 3:-3] = _EDGE
            tile[5:-5, 5:-5] = _DONE if code == BOX_ON_TARGET else _BOX
        if code in (PLAYER, PLAYER_ON_TARGET):
            tile[_RADIUS < TILE * 0.27] = _PLAYER
    return picture
