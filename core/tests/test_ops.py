"""Segment arithmetic against loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data import Batch, Sample, Trajectory, Turn, build_batch
from turnwise.data.ops import (
    discounted_sums,
    last_sampled,
    run_ends,
    run_starts,
    sampled_to_tokens,
    segment_means,
    segment_sums,
    trains,
    trajectories_to_tokens,
    turns_to_tokens,
    whiten,
)


def slow_discounted(values: list[float], gamma: float, labels: list[int]) -> list[float]:
    out = [0.0] * len(values)
    for t in reversed(range(len(values))):
        follows = t + 1 < len(values) and labels[t + 1] == labels[t]
        out[t] = values[t] + (gamma * out[t + 1] if follows else 0.0)
    return out


@given(
    runs=st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=20), max_size=6),
    gamma=st.sampled_from([0.0, 0.3, 0.95, 0.999, 1.0]),
)
def test_discounted_equals_the_backward_loop(runs: list[list[float]], gamma: float) -> None:
    values = [x for run in runs for x in run]
    labels = [i for i, run in enumerate(runs) for _ in run]
    np.testing.assert_allclose(
        discounted_sums(np.array(values), np.array(labels, np.int64), gamma),
        slow_discounted(values, gamma, labels),
        atol=1e-9,
    )


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.5, 1e-3])
def test_discounted_is_exact_over_long_runs(gamma: float) -> None:
    n = 20_000
    got = discounted_sums(np.ones(n), np.zeros(n, np.int64), gamma)
    left = np.arange(n, 0, -1.0)
    expected = left if gamma == 1.0 else (1.0 - gamma**left) / (1.0 - gamma)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_discounted_of_a_run_does_not_depend_on_its_neighbours() -> None:
    values = np.random.default_rng(0).normal(size=40)
    alone = discounted_sums(values[7:20], np.zeros(13, np.int64), 0.97)
    labels = np.repeat([5, 2, 9], [7, 13, 20])
    assert np.array_equal(discounted_sums(values, labels, 0.97)[7:20], alone)


def test_discounted_leaves_its_input_alone_and_takes_no_entries() -> None:
    values = np.ones(3)
    discounted_sums(values, np.zeros(3, np.int64), 1.0)
    assert values.tolist() == [1, 1, 1]
    assert discounted_sums(np.zeros(0), np.zeros(0, np.int64), 0.9).shape == (0,)


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_discounted_refuses_a_discount_outside_the_unit_interval(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        discounted_sums(np.ones(2), np.zeros(2, np.int64), gamma)


def test_run_starts_and_ends_mark_each_change() -> None:
    labels = np.array([3, 3, 1, 1, 1, 3])
    assert run_starts(labels).tolist() == [0, 2, 5]
    assert run_ends(labels).tolist() == [2, 5, 6]
    assert run_starts(np.zeros(0)).tolist() == run_ends(np.zeros(0)).tolist() == []


def test_sums_and_means_of_empty_segments_are_zero_or_as_asked() -> None:
    values, labels = np.array([1.0, 2.0, 4.0]), np.array([2, 0, 2])
    assert segment_sums(values, labels, 4).tolist() == [2, 0, 5, 0]
    assert segment_means(values, labels, 4).tolist() == [2, 0, 2.5, 0]
    assert np.isnan(segment_means(values, labels, 4, empty=np.nan)).tolist() == [False, True, False, True]
    assert segment_sums(np.zeros(0), np.zeros(0, np.int64), 2).tolist() == [0, 0]


def test_whiten_reference_numbers() -> None:
    np.testing.assert_allclose(whiten(np.array([1.0, 2.0, 4.0])), [-0.872872, -0.218218, 1.091089], atol=1e-6)


def test_whiten_of_fewer_than_two_values_changes_nothing_and_of_equal_ones_gives_zero() -> None:
    assert whiten(np.array([3.5])).tolist() == [3.5]
    assert whiten(np.zeros(0)).tolist() == []
    assert whiten(np.full(7, 1e12 + 0.1)).tolist() == [0.0] * 7


def small_batch() -> Batch:
    """Trajectory 0: turn 0 sampled two tokens, turn 1 one, in two rows of which the later turn stands first; trajectory
    1: nothing sampled."""
    none = np.zeros(0, np.int32)
    turns = tuple(Turn(none, none, np.zeros(0, np.bool_), None, none, 1.0, None) for _ in range(2))
    played = [Trajectory("A", 0, member, 0, turns, "terminated") for member in range(2)]
    rows = [np.array([-1, 1, -1]), np.array([-1, 0, 0])]
    return build_batch(played, [[Sample(np.zeros(3), row >= 0, row, None, np.zeros(3)) for row in rows], []])


def test_values_of_turns_and_trajectories_go_to_their_sampled_tokens_alone() -> None:
    batch = small_batch()
    assert turns_to_tokens(batch, np.array([5, 7, 8, 9])).tolist() == [0, 7, 0, 0, 5, 5]
    assert trajectories_to_tokens(batch, np.array([3, 4])).tolist() == [0, 3, 0, 0, 3, 3]
    assert sampled_to_tokens(batch, np.array([1, 2, 3])).tolist() == [0, 3, 0, 0, 1, 2]
    assert last_sampled(batch).tolist() == [1, -1]


def test_trajectories_that_do_not_train_get_nothing() -> None:
    batch = small_batch()
    assert trains(batch).tolist() == [True, True]
    dropped = batch.with_trajectories(trains=np.array([False, True]))
    assert trains(dropped).tolist() == [False, True]
    assert not trajectories_to_tokens(dropped, np.array([3, 4])).any()
