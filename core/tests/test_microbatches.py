"""Micro-batches: every sample once, within the limit, sorted by length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data.microbatches import by_rows, by_tokens, cut, non_padding_share, pack, packed

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


def test_rows_are_sorted_by_length_and_cut_in_order() -> None:
    groups = by_rows(np.array([3, 9, 3, 5, 1]), 2)
    assert [g.tolist() for g in groups] == [[1, 3], [0, 2], [4]]


def test_a_token_budget_counts_padding() -> None:
    # 9+pad: 10 // 9 = 1 row; 5: 10 // 5 = 2 rows (5 and 3 padded to 5); then 3, 1.
    groups = by_tokens(np.array([3, 9, 3, 5, 1]), 10)
    assert [g.tolist() for g in groups] == [[1], [3, 0], [2, 4]]


def test_a_sample_over_the_budget_stands_alone() -> None:
    assert [g.tolist() for g in by_tokens(np.array([2, 40, 2]), 8)] == [[1], [0, 2]]


@given(LENGTHS, st.integers(1, 60))
def test_every_sample_is_in_exactly_one_group_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = by_tokens(np.array(lengths, np.int64), budget)
    assert sorted(i for group in groups for i in group.tolist()) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * max(lengths[i] for i in group)
        assert len(group) == 1 or padded <= budget or padded == 0


@given(LENGTHS, st.integers(1, 7))
def test_every_sample_is_in_exactly_one_group_of_at_most_so_many_rows(lengths: list[int], rows: int) -> None:
    groups = by_rows(np.array(lengths, np.int64), rows)
    assert sorted(i for group in groups for i in group.tolist()) == list(range(len(lengths)))
    assert all(1 <= len(group) <= rows for group in groups)


def test_a_budget_wins_over_the_number_of_rows() -> None:
    lengths = np.array([4, 4, 4])
    assert [len(g) for g in cut(lengths, 1)] == [1, 1, 1]
    assert [len(g) for g in cut(lengths, 1, budget=8)] == [2, 1]


@pytest.mark.parametrize("function", [by_rows, by_tokens, pack, packed])
def test_a_limit_below_one_is_refused(function: object) -> None:
    with pytest.raises(ValueError, match="at least"):
        function(np.array([1]), 0)  # type: ignore[operator]


def test_a_sample_goes_to_the_row_where_the_least_room_is_left() -> None:
    # Rows of 10, longest first: 7 opens a row (3 left), 6 another (4 left); 4 fits the second exactly, 3 the first, 2
    # and 1 open a third.
    rows = pack(np.array([4, 7, 1, 6, 3, 2]), 10)
    assert [row.tolist() for row in rows] == [[1, 4], [3, 0], [5, 2]]


def test_packed_rows_are_as_wide_as_the_longest_sample_and_as_many_as_the_budget_holds() -> None:
    lengths = np.array([4, 7, 1, 6, 3, 2])
    assert [[row.tolist() for row in group] for group in packed(lengths, 14)] == [[[1], [3, 2]], [[0, 4], [5]]]
    assert [[row.tolist() for row in group] for group in packed(lengths, 14, one_row=True)] == [
        [[1, 3, 2]],
        [[0, 4, 5]],
    ]


def test_a_sample_over_the_budget_is_not_cut() -> None:
    assert [[row.tolist() for row in group] for group in packed(np.array([2, 40, 2]), 8)] == [[[1]], [[0, 2]]]
    assert [[row.tolist() for row in group] for group in packed(np.array([2, 40, 2]), 8, one_row=True)] == [
        [[1]],
        [[0, 2]],
    ]


@given(LENGTHS, st.integers(1, 120), st.booleans())
def test_packing_keeps_every_sample_once_within_the_budget(lengths: list[int], budget: int, one_row: bool) -> None:
    sizes = np.array(lengths, np.int64)
    groups = packed(sizes, budget, one_row)
    assert sorted(i for group in groups for row in group for i in row.tolist()) == list(range(len(lengths)))
    for group in groups:
        fills = [int(sizes[row].sum()) for row in group]
        assert len(group) * max(fills) <= max(budget, *lengths)
        assert fills == sorted(fills, reverse=True)
        assert not one_row or len(group) == 1


def test_padding_is_counted_by_hand() -> None:
    lengths = np.array([4, 2, 3])
    assert non_padding_share(lengths, [[np.array([0]), np.array([1])], [np.array([2])]]) == pytest.approx(
        9 / 11
    )  # 2 × 4, then 3
    assert non_padding_share(lengths, [[np.array([0]), np.array([1, 2])]]) == pytest.approx(9 / 10)
    assert non_padding_share(np.zeros(0, np.int64), []) == 1.0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [4096, 16384])
def test_packing_leaves_at_most_three_percent_padding_on_a_long_tail(seed: int, budget: int) -> None:
    """A rollout of 256 trajectories, lognormal with a median of 400 tokens, cut at 4,096."""
    lengths = np.minimum(np.random.default_rng(seed).lognormal(6, 1, 256), 4096).astype(np.int64)
    in_order = [[np.array([i]) for i in range(start, start + 4)] for start in range(0, 256, 4)]
    assert non_padding_share(lengths, in_order) < 0.65
    assert non_padding_share(lengths, packed(lengths, budget)) >= 0.97
    assert non_padding_share(lengths, packed(lengths, budget, one_row=True)) == 1.0
