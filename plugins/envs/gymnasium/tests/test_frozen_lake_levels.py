"""Levels of FrozenLake: solvable, determined by the seed, held out by content, cached."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import is_valid
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import ConfigError
from turnwise_gymnasium.levels import SPLITS, make_level, moves, split_of


def reachable_by_flooding(rows: list[str]) -> bool:
    """A slow reference: mark neighbours of marked cells until nothing changes."""
    grid = np.array([list(row) for row in rows])
    marked = grid == "S"
    for _ in range(grid.size):
        grown = marked.copy()
        grown[1:] |= marked[:-1]
        grown[:-1] |= marked[1:]
        grown[:, 1:] |= marked[:, :-1]
        grown[:, :-1] |= marked[:, 1:]
        marked = grown & (grid != "H")
    return bool(marked[grid == "G"].all())


@settings(max_examples=80)
@given(st.integers(0, 2**64), st.integers(3, 7), st.sampled_from([0.6, 0.8, 1.0]), st.booleans())
def test_every_level_is_solvable_with_one_start_and_one_other_goal(
    seed: int, size: int, p: float, random_start_goal: bool
) -> None:
    level = make_level(seed, size, p, random_start_goal, "all")
    assert level.cells.count("S") == level.cells.count("G") == 1
    assert len(level.cells) == size * size
    assert set(level.cells) <= set("SGFH")
    assert level.cells[level.start] == "S"
    assert level.cells[level.goal] == "G"
    assert reachable_by_flooding(level.rows)
    if not random_start_goal:
        assert (level.start, level.goal) == (0, size * size - 1)
        assert is_valid([list(row) for row in level.rows], size)  # Gymnasium's own check


def test_a_seed_gives_its_level_again_without_the_cache() -> None:
    first = [make_level(seed, 4, 0.8, True, "train") for seed in range(50)]
    make_level.cache_clear()
    assert first == [make_level(seed, 4, 0.8, True, "train") for seed in range(50)]
    assert len({level.cells for level in first}) > 40


def test_members_of_a_group_share_one_level_object() -> None:
    assert make_level(7, 4, 0.8, True, "train") is make_level(7, 4, 0.8, True, "train")
    assert make_level.cache_info().maxsize == 4096


@pytest.mark.parametrize("random_start_goal", [False, True])
def test_splits_share_no_map_and_have_their_sizes(random_start_goal: bool) -> None:
    maps = {
        split: {make_level(seed, 4, 0.8, random_start_goal, split).cells for seed in range(400)} for split in SPLITS
    }
    assert not maps["train"] & maps["val"]
    assert not maps["train"] & maps["test"]
    assert not maps["val"] & maps["test"]
    assert min(map(len, maps.values())) > 60  # the splits are not a handful of maps
    drawn = [split_of(make_level(seed, 6, 0.8, True, "all").cells) for seed in range(2000)]
    assert drawn.count("test") / 2000 == pytest.approx(0.2, abs=0.03)
    assert drawn.count("val") / 2000 == pytest.approx(0.1, abs=0.025)


def test_the_split_is_that_of_the_documented_hash() -> None:
    for seed in range(50):
        cells = make_level(seed, 4, 0.8, True, "all").cells
        bucket = int(hashlib.sha256(cells.encode()).hexdigest()[:16], 16) % 20
        assert split_of(cells) == ("test" if bucket < 4 else "val" if bucket < 6 else "train")


def test_start_and_goal_are_part_of_the_content() -> None:
    assert (
        len(
            {
                split_of(cells)
                for cells in ("SGFF" * 4, "GSFF" * 4, "FSGF" * 4, "FGSF" * 4, "FFSG" * 4, "FFGS" * 4, "SFGF" * 4)
            }
        )
        > 1
    )


def test_a_split_without_any_map_is_reported_in_one_line() -> None:
    only = make_level(0, 2, 1.0, False, "all").cells  # p 1 and fixed corners: a single map
    absent = next(split for split in ("train", "val", "test") if split != split_of(only))
    with pytest.raises(ConfigError, match="no solvable map") as caught:
        make_level(0, 2, 1.0, False, absent)
    assert "\n" not in str(caught.value)


def test_moves_by_hand() -> None:
    assert moves(2) == ((0, 2, 1, 0), (0, 3, 1, 1), (2, 2, 3, 0), (2, 3, 3, 1))
