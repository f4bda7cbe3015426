"""Micro-batches: every sample once, within the limit, sorted by length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data.microbatches import by_rows, by_tokens, cut

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


@pytest.mark.parametrize("function", [by_rows, by_tokens])
def test_a_limit_below_one_is_refused(function: object) -> None:
    with pytest.raises(ValueError, match="at least"):
        function(np.array([1]), 0)  # type: ignore[operator]
