"""MiniGrid's observations (Chevalier-Boisvert et al. 2023, arXiv 2306.13831) as text: the mission, the facing, a map,
and what is in view.

Read by their shape: a dictionary of a `mission` and an `image` of uint8 [columns, rows, 3] that holds object, colour
and state of every cell. Nothing is imported, so BabyAI and whoever else writes this encoding is shown as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# In the order of MiniGrid's OBJECT_TO_IDX, COLOR_TO_IDX, STATE_TO_IDX and directions: cells hold these indices.
OBJECTS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
DOORS = ("open", "closed", "locked")
FACINGS = ("right", "down", "left", "up")
SYMBOLS = "?.#_DKBXG~@"
ARROWS = ">v<^"
LEGEND = "? not seen, # wall, . empty, _ floor, D door, K key, B ball, X box, G goal, ~ lava"


def is_grid(value: Any) -> bool:
    """Whether an observation is MiniGrid's, encoded: an RGB image in its place holds numbers that no cell has."""
    if not (isinstance(value, Mapping) and isinstance(value.get("mission"), str)):
        return False
    image = value.get("image")
    if not (
        isinstance(image, np.ndarray)
        and image.ndim == 3
        and image.shape[2] == 3
        and image.size
        and image.dtype.kind in "iu"
    ):
        return False
    return bool((image.reshape(-1, 3).max(0) < (len(OBJECTS), len(COLOURS), len(ARROWS))).all() and image.min() >= 0)


def fields(value: Mapping[str, Any]) -> dict[str, str]:
    """The texts of a grid's observation by the names of its fields; `image` is the map and what is in it."""
    texts = {"mission": str(value["mission"]), "image": map_text(value["image"])}
    if "direction" in value:
        texts["direction"] = FACINGS[int(value["direction"]) % len(FACINGS)]
    return texts


def grid_text(value: Mapping[str, Any]) -> str:
    """The whole observation."""
    texts = fields(value)
    facing = [f"Facing: {texts['direction']}"] if "direction" in texts else []
    return "\n".join([f"Mission: {texts['mission']}", *facing, texts["image"]])


def map_text(image: np.ndarray) -> str:
    """A map row by row, and the things in it. Without an agent among its cells it is the agent's own view: the agent
    stands at the middle of the lowest row and looks up, and its cell holds what it carries."""
    agents = np.argwhere(image[..., 0] == OBJECTS.index("agent"))
    rows = [[SYMBOLS[int(cell[0])] for cell in image[:, row]] for row in range(image.shape[1])]
    things, carried = list(_things(image)), ""
    if len(agents):
        at, arrow = tuple(int(place) for place in agents[0]), ARROWS[int(image[tuple(agents[0])][2])]
        named = [f"{name} at column {column + 1}, row {row + 1}" for column, row, name in things]
        head = f"Map (you are {arrow} at column {at[0] + 1}, row {at[1] + 1}; {LEGEND}):"
    else:
        at, arrow = (image.shape[0] // 2, image.shape[1] - 1), "^"
        carried = next((name for column, row, name in things if (column, row) == at), "")
        named = [f"{name} {_seen_from(at, column, row)}" for column, row, name in things if (column, row) != at]
        head = f"View (you are ^ and look up; {LEGEND}):"
    rows[at[1]][at[0]] = arrow
    lines = [head, *(" ".join(row) for row in rows), f"In view: {'; '.join(named) or 'nothing'}"]
    return "\n".join([*lines, f"Carrying: {carried}"] if carried else lines)


def _things(image: np.ndarray) -> Iterator[tuple[int, int, str]]:
    """(column, row, name) of what stands out, row by row."""
    for row in range(image.shape[1]):
        for column in range(image.shape[0]):
            kind, colour, state = (int(number) for number in image[column, row])
            name = OBJECTS[kind]
            if name in ("door", "key", "ball", "box"):
                condition = f"{DOORS[state]} " if name == "door" and state < len(DOORS) else ""
                yield column, row, f"{condition}{COLOURS[colour]} {name}"
            elif name in ("goal", "lava"):
                yield column, row, name


def _seen_from(at: tuple[int, int], column: int, row: int) -> str:
    ahead, side = at[1] - row, column - at[0]
    parts = [f"{ahead} ahead"] if ahead else []
    if side:
        parts.append(f"{abs(side)} {'right' if side > 0 else 'left'}")
    return " ".join(parts)
