"""Segment arithmetic against loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data.ops import discounted, run_ends, run_starts, segment_means, segment_sums, whiten


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
    np.testing.assert_allclose(discounted(np.array(values), gamma, np.array(labels, np.int64)), slow_discounted(values, gamma, labels), atol=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.5, 1e-3])
def test_discounted_is_exact_over_long_runs(gamma: float) -> None:
    n = 20_000
    got = discounted(np.ones(n), gamma, np.zeros(n, np.int64))
    left = np.arange(n, 0, -1.0)
    expected = left if gamma == 1.0 else (1.0 - gamma**left) / (1.0 - gamma)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_discounted_of_a_run_does_not_depend_on_its_neighbours() -> None:
    values = np.random.default_rng(0).normal(size=40)
    alone = discounted(values[7:20], 0.97, np.zeros(13, np.int64))
    labels = np.repeat([5, 2, 9], [7, 13, 20])
    assert np.array_equal(discounted(values, 0.97, labels)[7:20], alone)


def test_discounted_leaves_its_input_alone_and_takes_no_entries() -> None:
    values = np.ones(3)
    discounted(values, 1.0, np.zeros(3, np.int64))
    assert values.tolist() == [1, 1, 1]
    assert discounted(np.zeros(0), 0.9, np.zeros(0, np.int64)).shape == (0,)


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_discounted_refuses_a_discount_outside_the_unit_interval(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        discounted(np.ones(2), gamma, np.zeros(2, np.int64))


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
