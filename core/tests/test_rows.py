"""Rows: whole samples as flat arrays, selected and repeated without mixing them up."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data import Rows, Sample, Trajectory, Turn, build_batch
from turnwise.data.rows import ranges, rows_of


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=10))
def test_ranges_equals_the_loop(pairs: list[tuple[int, int]]) -> None:
    expected = [i for start, length in pairs for i in range(start, start + length)]
    starts, lengths = np.array([s for s, _ in pairs], np.int64), np.array([n for _, n in pairs], np.int64)
    assert ranges(starts, lengths).tolist() == expected
    assert ranges(starts, lengths).dtype == np.int64


def make_rows(masks: list[list[bool]]) -> Rows:
    mask = np.array([m for one in masks for m in one], np.bool_)
    offsets = np.cumsum([0] + [len(m) for m in masks]).astype(np.int64)
    sampled = np.flatnonzero(mask)
    images = tuple((np.full((1, 1, 3), s, np.uint8),) for s in range(len(masks)))
    return Rows(
        np.arange(len(mask), dtype=np.int32),
        offsets,
        mask,
        {"at": sampled, "wide": np.stack([sampled, -sampled], 1)},
        images,
    )


@given(st.data())
def test_select_gives_each_named_sample_whole_and_in_order(data: st.DataObject) -> None:
    masks = data.draw(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=6))
    chosen = data.draw(st.lists(st.integers(0, len(masks) - 1), max_size=8))
    rows = make_rows(masks)
    picked = rows.select(np.array(chosen, np.int64))
    assert len(picked) == len(chosen)
    assert picked.lengths.tolist() == [len(masks[s]) for s in chosen]
    expected = [i for s in chosen for i in range(rows.offsets[s], rows.offsets[s + 1])]
    assert picked.input_ids.tolist() == expected
    assert picked.response_mask.tolist() == [m for s in chosen for m in masks[s]]
    sampled = [i for i in expected if rows.response_mask[i]]
    assert picked.columns["at"].tolist() == sampled
    assert picked.columns["wide"].tolist() == [[i, -i] for i in sampled]
    assert [int(mine[0][0, 0, 0]) for mine in picked.images] == chosen


def test_an_empty_selection_has_no_samples_and_keeps_the_columns() -> None:
    empty = make_rows([[False, True]]).select(np.zeros(0, np.int64))
    assert len(empty) == 0
    assert empty.offsets.tolist() == [0]
    assert empty.columns["wide"].shape == (0, 2)


def test_rows_of_a_batch_hold_its_samples_columns_and_images() -> None:
    turns = tuple(Turn(np.zeros(0), np.zeros(0), np.zeros(0, np.bool_), None, np.zeros(0), 1.0, None) for _ in range(2))
    pictures = tuple(np.full((1, 1, 3), i, np.uint8) for i in range(2))
    played = [Trajectory("A", 0, m, 0, turns, "terminated", images=pictures) for m in range(2)]

    def row(turn: int, images: tuple[int, ...]) -> Sample:
        return Sample(
            np.array([9, 10 + turn]), np.array([False, True]), np.array([-1, turn]), None, np.zeros(2), images=images
        )

    batch = build_batch(played, [[row(0, (0,)), row(1, (0, 1))], [row(0, ())]])
    rows = rows_of(batch)
    assert rows.input_ids.tolist() == [9, 10, 9, 11, 9, 10]
    assert rows.offsets.tolist() == [0, 2, 4, 6]
    assert rows.columns["trajectory"].tolist() == [0, 0, 1]
    assert rows.columns["turn"].tolist() == [0, 1, 2]
    assert rows.columns["token_level_rewards"].tolist() == [
        1,
        1,
        2,
    ]  # nothing was sampled in the last turn of the second trajectory
    assert [[int(i[0, 0, 0]) for i in mine] for mine in rows.images] == [[0], [0, 1], []]
    some = rows_of(batch, np.array([2, 1]), columns=("sample",))
    assert set(some.columns) == {"sample"}
    assert some.columns["sample"].tolist() == [2, 1]
    assert some.input_ids.tolist() == [9, 10, 9, 11]


def test_rows_without_any_image_carry_none() -> None:
    turn = Turn(np.zeros(0), np.zeros(0), np.zeros(0, np.bool_), None, np.zeros(0), 1.0, None)
    batch = build_batch(
        [Trajectory("A", 0, 0, 0, (turn,), "terminated")],
        [[Sample(np.zeros(2), np.array([False, True]), np.array([-1, 0]), None, np.zeros(2))]],
    )
    assert rows_of(batch).images == ()
