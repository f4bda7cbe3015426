"""Sokoban rooms: solvable (a solver of the test's own), determined by the seed, held out by content."""

from __future__ import annotations

import heapq

import pytest

from turnwise.errors import ConfigError
from turnwise_sokoban.rooms import SPLITS, Room, codes, make_room, split_of

Cell = tuple[int, int]
DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))


class Puzzle:
    """The room in coordinates, read off its codes: nothing here is shared with the generator."""

    def __init__(self, room: Room) -> None:
        shown = codes(room, room.boxes, room.player)
        cells = {divmod(i, room.width): code for i, code in enumerate(shown)}
        self.floor = {cell for cell, code in cells.items() if code != 0}
        self.targets = frozenset(cell for cell, code in cells.items() if code in (2, 3, 6))
        self.boxes = frozenset(cell for cell, code in cells.items() if code in (3, 4))
        (self.player,) = (cell for cell, code in cells.items() if code in (5, 6))

    def moves(self, player: Cell, boxes: frozenset[Cell]) -> list[tuple[Cell, frozenset[Cell]]]:
        found = []
        for dy, dx in DIRECTIONS:
            cell, beyond = (player[0] + dy, player[1] + dx), (player[0] + 2 * dy, player[1] + 2 * dx)
            if cell in boxes:
                if beyond in self.floor and beyond not in boxes:
                    found.append((cell, boxes - {cell} | {beyond}))
            elif cell in self.floor:
                found.append((cell, boxes))
        return found

    def shortest(self, limit: int) -> int | None:
        """Moves of the shortest solution, by breadth-first search; None if it is longer than `limit`."""
        seen = {(self.player, self.boxes)}
        front = list(seen)
        for depth in range(1, limit + 1):
            front = [state for at in front for state in self.moves(*at) if state not in seen and not seen.add(state)]  # type: ignore[func-returns-value]
            if any(boxes == self.targets for _, boxes in front):
                return depth
        return None

    def solvable(self, limit: int = 300_000) -> bool:
        """Best-first search over all states: it looks first where the boxes are nearest to targets."""

        def far(boxes: frozenset[Cell]) -> int:
            return sum(min(abs(y - ty) + abs(x - tx) for ty, tx in self.targets) for y, x in boxes)

        start = (self.player, self.boxes)
        seen, heap, serial = {start}, [(far(self.boxes), 0, start)], 0
        while heap and len(seen) < limit:
            _, _, state = heapq.heappop(heap)
            if state[1] == self.targets:
                return True
            for following in self.moves(*state):
                if following not in seen:
                    seen.add(following)
                    serial += 1
                    heapq.heappush(heap, (far(following[1]), serial, following))
        return False


@pytest.mark.parametrize(
    ("height", "width", "num_boxes", "search_depth", "seeds"),
    [
        (6, 6, 1, 10, 200),
        (6, 6, 1, 60, 80),
        (3, 5, 1, 1, 20),
        (5, 3, 1, 3, 20),
        (3, 9, 1, 12, 40),
        (7, 6, 2, 14, 60),
        (8, 8, 2, 10, 80),
        (9, 5, 3, 9, 40),
    ],
)
def test_every_room_is_solved_within_search_depth_moves(
    height: int, width: int, num_boxes: int, search_depth: int, seeds: int
) -> None:
    for seed in range(seeds):
        assert Puzzle(make_room(seed, height, width, num_boxes, search_depth, "all")).shortest(search_depth) is not None


@pytest.mark.parametrize(
    ("height", "width", "num_boxes", "search_depth", "seeds"),
    [(7, 7, 2, 200, 100), (8, 8, 3, 100, 100), (10, 10, 4, 300, 60)],
)
def test_deep_rooms_are_solvable(height: int, width: int, num_boxes: int, search_depth: int, seeds: int) -> None:
    for seed in range(seeds):
        assert Puzzle(make_room(seed, height, width, num_boxes, search_depth, "all")).solvable()


def test_a_deeper_search_gives_longer_puzzles() -> None:
    lengths = {}
    for depth in (5, 60):
        solved = [Puzzle(make_room(seed, 7, 7, 1, depth, "all")).shortest(60) for seed in range(60)]
        lengths[depth] = sum(length for length in solved if length) / len(solved)
    assert lengths[5] <= 5
    assert lengths[60] > 1.5 * lengths[5]


@pytest.mark.parametrize(("height", "width", "num_boxes"), [(6, 6, 1), (8, 7, 3), (10, 10, 4)])
def test_the_parts_of_a_room_fit(height: int, width: int, num_boxes: int) -> None:
    for seed in range(60):
        room = make_room(seed, height, width, num_boxes, 50, "all")
        shown = codes(room, room.boxes, room.player)
        rows = [shown[i : i + width] for i in range(0, len(shown), width)]
        assert len(rows) == height
        assert set(rows[0]) == set(rows[-1]) == {0}
        assert {row[0] for row in rows} == {row[-1] for row in rows} == {0}
        assert len(room.boxes) == len(room.targets) == num_boxes
        assert room.boxes != room.targets
        assert sum(code in (5, 6) for code in shown) == 1
        floor = {divmod(i, width) for i, code in enumerate(shown) if code}
        reached = {next(iter(floor))}
        for _ in range(len(floor)):
            reached |= {(y + dy, x + dx) for y, x in reached for dy, dx in DIRECTIONS} & floor
        assert reached == floor


def test_a_seed_gives_its_room_again_without_the_cache() -> None:
    first = [make_room(seed, 6, 6, 2, 30, "train") for seed in range(40)]
    assert make_room(3, 6, 6, 2, 30, "train") is first[3]
    make_room.cache_clear()
    assert first == [make_room(seed, 6, 6, 2, 30, "train") for seed in range(40)]
    assert len(set(first)) > 35


def test_splits_share_no_room_and_have_their_sizes() -> None:
    rooms = {split: {make_room(seed, 5, 5, 1, 10, split) for seed in range(250)} for split in SPLITS}
    shown = {split: {tuple(codes(room, room.boxes, room.player)) for room in some} for split, some in rooms.items()}
    assert not shown["train"] & shown["val"]
    assert not shown["train"] & shown["test"]
    assert not shown["val"] & shown["test"]
    drawn = [split_of(make_room(seed, 6, 6, 1, 10, "all")) for seed in range(1500)]
    assert drawn.count("test") / 1500 == pytest.approx(0.2, abs=0.035)
    assert drawn.count("val") / 1500 == pytest.approx(0.1, abs=0.03)


def test_more_boxes_than_the_room_holds_is_reported_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"no room .* sokoban\. Fix: ") as caught:
        make_room(0, 3, 5, 3, 10, "all")
    assert "\n" not in str(caught.value)
