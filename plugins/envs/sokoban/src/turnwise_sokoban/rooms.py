"""Sokoban rooms from a seed, solvable because they are made by playing backwards from the solved room."""

from __future__ import annotations

import hashlib
from collections import deque
from functools import lru_cache

import numpy as np
from attrs import frozen

from turnwise.errors import ConfigError

SPLITS = ("all", "train", "val", "test")
# Draws until options that allow no such room are reported.
MAX_ROOMS = 2_000
# More than the groups of a step, whose members reset one after the other.
CACHED_ROOMS = 4096
# Some layouts leave boxes that no pull can move.
LAYOUTS_PER_ROOM = 8
WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
"""The field's codes of what a cell shows, the keys of `grid_lookup`."""


@frozen
class Room:
    """A room as it starts: `walls` one flag a cell in reading order, the rest indices of cells. The outermost cells are
    walls."""

    height: int
    width: int
    walls: tuple[bool, ...]
    targets: frozenset[int]
    boxes: frozenset[int]
    player: int

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """What Up, Down, Left and Right add to an index."""
        return (-self.width, self.width, -1, 1)


def codes(room: Room, boxes: frozenset[int], player: int) -> list[int]:
    """What each cell shows, in reading order."""
    shown = [WALL if wall else FLOOR for wall in room.walls]
    for cell in room.targets:
        shown[cell] = TARGET
    for cell in boxes:
        shown[cell] = BOX_ON_TARGET if cell in room.targets else BOX
    shown[player] = PLAYER_ON_TARGET if player in room.targets else PLAYER
    return shown


def split_of(room: Room) -> str:
    """The split that a room belongs to, by the SHA-256 of its size and codes: a fifth is `test`, a tenth `val`, the
    rest `train`."""
    content = bytes([room.height, room.width, *codes(room, room.boxes, room.player)])
    bucket = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % 20
    return "test" if bucket < 4 else "val" if bucket < 6 else "train"


@lru_cache(maxsize=CACHED_ROOMS)
def make_room(seed: int, height: int, width: int, num_boxes: int, search_depth: int, split: str) -> Room:
    """The room of `seed`: rooms are drawn from the seed's own generator until one belongs to `split`.

    It has a solution of at most `search_depth` moves. The cache lets the members of a group share one room. Raises
    ConfigError after MAX_ROOMS rooms without one that fits.
    """
    rng = np.random.default_rng(seed)
    for _ in range(MAX_ROOMS):
        room = _draw_room(rng, height, width, num_boxes, search_depth)
        # By content, not by seed: two seeds may draw the same room, which must not train and test at once.
        if room is not None and split in ("all", split_of(room)):
            return room
    raise ConfigError(
        f"no room of split {split!r} among {MAX_ROOMS} drawn with dim_room [{height}, {width}], {num_boxes} boxes and"
        f" search_depth {search_depth}, sokoban. Fix: a larger dim_room, fewer boxes or a larger search_depth."
    )


def _draw_room(rng: np.random.Generator, height: int, width: int, num_boxes: int, search_depth: int) -> Room | None:
    """The best of a few layouts: the first with every box off the targets, else the one with the most; None if no box
    could be moved."""
    best, most = None, 0
    for _ in range(LAYOUTS_PER_ROOM):
        walls = carve(rng, height, width)
        floor = [cell for cell, wall in enumerate(walls) if not wall]
        # A pull needs two free cells beside the boxes: one where the player stands, one to step back to.
        if len(floor) < num_boxes + 2:
            continue
        targets = frozenset(floor[int(i)] for i in rng.choice(len(floor), num_boxes, replace=False))
        room = play_backwards(rng, Room(height, width, walls, targets, targets, -1), search_depth)
        off = 0 if room is None else len(room.boxes - targets)
        if off > most:
            best, most = room, off
        if most == num_boxes:
            break
    return best


def carve(rng: np.random.Generator, height: int, width: int) -> tuple[bool, ...]:
    """Walls with a connected floor: a walk of 1.7 × (height + width) cells that turns now and then, and widens as it
    goes."""
    wall = np.ones((height, width), bool)
    row, column = int(rng.integers(1, height - 1)), int(rng.integers(1, width - 1))
    directions = ((-1, 0), (1, 0), (0, -1), (0, 1))
    heading = directions[int(rng.integers(4))]
    for _ in range(int(1.7 * (height + width))):
        wall[row, column] = False
        # A cell beside the path gives room to walk around a box; it touches the path, so the floor stays connected.
        side = directions[int(rng.integers(4))]
        wall[min(max(row + side[0], 1), height - 2), min(max(column + side[1], 1), width - 2)] = False
        at_edge = not (1 <= row + heading[0] <= height - 2 and 1 <= column + heading[1] <= width - 2)
        if at_edge or rng.random() < 0.35:
            heading = directions[int(rng.integers(4))]
        row, column = min(max(row + heading[0], 1), height - 2), min(max(column + heading[1], 1), width - 2)
    return tuple(wall.ravel().tolist())


def play_backwards(rng: np.random.Generator, solved: Room, search_depth: int) -> Room | None:
    """Pull boxes off their targets with at most `search_depth` moves; the position whose boxes lie farthest away
    becomes the start.

    Every backward move (a step, or a step that pulls the box behind the player) is undone by one forward move, so the
    moves in reverse order solve the room. None if no box can be pulled.
    """
    # In the solved room the player may stand anywhere, so at first every pull is in reach.
    pulls = _pulls(solved, solved.boxes, None)
    if not pulls:
        return None
    box, step, _ = pulls[int(rng.integers(len(pulls)))]
    boxes, player, used = solved.boxes, box + step, 0
    best, best_score = None, (0, 0)
    while True:
        distance = _distances(solved, boxes, player)
        pulls = [pull for pull in _pulls(solved, boxes, distance) if used + pull[2] < search_depth]
        if not pulls:
            break
        box, step, walk = pulls[int(rng.integers(len(pulls)))]
        used, player = used + walk, box + step
        # On in the same direction for a random while: boxes that moved one cell would lie beside their targets.
        while True:
            boxes = boxes - {box} | {player}
            box, player, used = player, player + step, used + 1
            # Boxes off their targets count before distance: a room with a box that is there already is half solved.
            score = (len(boxes - solved.targets), sum(_nearest(solved, cell) for cell in boxes))
            if score > best_score:
                best_score, best = score, (boxes, player, used)
            behind = player + step
            if used >= search_depth or solved.walls[behind] or behind in boxes or rng.random() < 0.4:
                break
    if best is None:
        return None
    boxes, player, used = best
    # The player walks off, so that the room does not give the first push away.
    near = sorted(cell for cell, walk in _distances(solved, boxes, player).items() if walk <= search_depth - used)
    return Room(solved.height, solved.width, solved.walls, solved.targets, boxes, near[int(rng.integers(len(near)))])


def _pulls(room: Room, boxes: frozenset[int], distance: dict[int, int] | None) -> list[tuple[int, int, int]]:
    """(box, direction, moves to walk before it) of every pull; `distance` holds the cells in the player's reach, None:
    all of them."""
    found = []
    # In a fixed order, because the draw is by place in this list.
    for box in sorted(boxes):
        for step in room.steps:
            stand, back = box + step, box + 2 * step
            if room.walls[stand] or stand in boxes or room.walls[back] or back in boxes:
                continue
            if distance is None or stand in distance:
                found.append((box, step, 0 if distance is None else distance[stand]))
    return found


def _distances(room: Room, boxes: frozenset[int], player: int) -> dict[int, int]:
    """Steps from the player to every cell that it can walk to without touching a box."""
    distance = {player: 0}
    front = deque([player])
    while front:
        at = front.popleft()
        for step in room.steps:
            cell = at + step
            if cell not in distance and not room.walls[cell] and cell not in boxes:
                distance[cell] = distance[at] + 1
                front.append(cell)
    return distance


def _nearest(room: Room, cell: int) -> int:
    row, column = divmod(cell, room.width)
    return min(abs(row - target // room.width) + abs(column - target % room.width) for target in room.targets)
