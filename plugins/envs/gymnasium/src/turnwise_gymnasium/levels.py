"""Levels of FrozenLake: random solvable maps from a seed, held out by their content."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from attrs import frozen

from turnwise.errors import ConfigError

SPLITS = ("all", "train", "val", "test")
# Draws until options that allow no such map are reported.
MAX_DRAWS = 10_000
# More than the groups of a step, whose members reset one after the other.
CACHED_LEVELS = 4096


@frozen
class Level:
    """A map: `cells` holds size × size letters in reading order (S start, F ice, H hole, G goal); `start` and `goal`
    index them."""

    cells: str
    size: int
    start: int
    goal: int

    @property
    def rows(self) -> list[str]:
        """The map as Gymnasium's `desc`."""
        return [self.cells[i : i + self.size] for i in range(0, len(self.cells), self.size)]


def split_of(cells: str) -> str:
    """The split that a map belongs to, by the SHA-256 of its letters: a fifth is `test`, a tenth `val`, the rest
    `train`."""
    bucket = int.from_bytes(hashlib.sha256(cells.encode()).digest()[:8], "big") % 20
    return "test" if bucket < 4 else "val" if bucket < 6 else "train"


@lru_cache(maxsize=CACHED_LEVELS)
def make_level(seed: int, size: int, p: float, random_start_goal: bool, split: str) -> Level:
    """The level of `seed`: maps are drawn from the seed's own generator until one is solvable and belongs to `split`.

    Every cell is ice with probability `p`, on its own. Start and goal are the corners, or two different random ice
    cells. The cache lets the members of a group share one level. Raises ConfigError after MAX_DRAWS maps without one
    that fits.
    """
    # The seed's plain stream is the slips'.
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
    for _ in range(MAX_DRAWS):
        ice = (rng.random(size * size) < p).tolist()
        if random_start_goal:
            free = [cell for cell, frozen_over in enumerate(ice) if frozen_over]
            if len(free) < 2:
                continue
            first = int(rng.integers(len(free)))
            # Never the same cell, by one draw.
            second = (first + 1 + int(rng.integers(len(free) - 1))) % len(free)
            start, goal = free[first], free[second]
        else:
            start, goal = 0, size * size - 1
            ice[start] = ice[goal] = True
        if not connected(ice, size, start, goal):
            continue
        letters = ["F" if frozen_over else "H" for frozen_over in ice]
        letters[start], letters[goal] = "S", "G"
        cells = "".join(letters)
        # By content, not by seed: two seeds may draw the same map, which must not train and test at once.
        if split in ("all", split_of(cells)):
            return Level(cells, size, start, goal)
    raise ConfigError(
        f"no solvable map of split {split!r} among {MAX_DRAWS} drawn with size {size} and p {p}, frozen_lake. "
        "Fix: raise p, or use a larger size or random_start_goal: true, so that there are more maps."
    )


def connected(ice: list[bool], size: int, start: int, goal: int) -> bool:
    """Whether a path of ice leads from `start` to `goal` (breadth first)."""
    seen = {start}
    front = [start]
    while front:
        reached = {cell for at in front for cell in moves(size)[at] if ice[cell]} - seen
        if goal in reached:
            return True
        seen |= reached
        front = list(reached)
    return False


@lru_cache(maxsize=64)
def moves(size: int) -> tuple[tuple[int, int, int, int], ...]:
    """For each cell, the cell that Left, Down, Right and Up lead to; the edge holds the player."""
    last = size - 1
    return tuple(
        (
            row * size + max(column - 1, 0),
            min(row + 1, last) * size + column,
            row * size + min(column + 1, last),
            max(row - 1, 0) * size + column,
        )
        for row in range(size)
        for column in range(size)
    )
