"""Group filters: what each keeps, that trajectories count and not rows, and that each sees what the ones before it
left."""

from __future__ import annotations

import statistics
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.contracts.group_filter import FilterContext
from turnwise.data.batch import Table
from turnwise_filters.config import TopSpreadConfig
from turnwise_filters.no_signal import NoSignal
from turnwise_filters.overlong import Overlong
from turnwise_filters.top_spread import TopSpread


def table(
    groups: list[int], scores: list[float], trains: list[bool] | None = None, stop: list[str] | None = None
) -> Table:
    columns: dict[str, Any] = {
        "group": np.array(groups, np.int64),
        "traj_group_id": np.array(groups, np.int64),
        "scores": np.array(scores, np.float64),
        "stop_reason": np.array(stop or ["terminated"] * len(groups), object),
    }
    if trains is not None:
        columns["trains"] = np.array(trains, np.bool_)
    return Table(columns, len(groups))


def no_signal(made: Table) -> list[bool]:
    kept: list[bool] = NoSignal(None, FilterContext()).keep(made).tolist()
    return kept


def top_spread(made: Table, keep: float) -> list[bool]:
    kept: list[bool] = TopSpread(TopSpreadConfig(keep), FilterContext()).keep(made).tolist()
    return kept


def test_groups_of_equal_scores_and_groups_of_one_carry_no_signal() -> None:
    made = table([3, 3, 3, 5, 5, 9, 4, 4], [0.1, 0.1, 0.1, 0.0, 1.0, 7.0, 1e9 + 0.1, 1e9 + 0.1])
    assert no_signal(made) == [False] * 3 + [True] * 2 + [False] * 3


@pytest.mark.parametrize(("gap", "kept"), [(1.0e-6, False), (2.0e-6, True)])
def test_the_border_is_a_sigma_of_one_millionth(gap: float, kept: bool) -> None:
    assert no_signal(table([0, 0], [0.0, gap])) == [kept] * 2  # σ = gap / √2


def test_members_that_were_dropped_before_are_not_counted() -> None:
    groups, scores = [0, 0, 0, 1, 1], [1.0, 1.0, 0.0, 0.0, 1.0]
    assert no_signal(table(groups, scores)) == [True] * 5
    assert no_signal(table(groups, scores, trains=[True, True, False, True, False])) == [False] * 5


def test_the_groups_of_highest_spread_are_kept() -> None:
    made = table([0, 0, 1, 1, 1, 2, 2, 3, 3], [0.0, 0.1, 0.0, 5.0, 5.0, 1.0, 1.0, 0.0, 1.0])
    assert top_spread(made, 0.5) == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
    assert top_spread(made, 0.25) == [False] * 2 + [True] * 3 + [False] * 4
    assert top_spread(made, 0.01) == [False] * 2 + [True] * 3 + [False] * 4  # at least one
    assert top_spread(made, 1.0) == [True] * 9


def test_at_equal_spread_the_lower_number_is_kept() -> None:
    assert top_spread(table([8, 8, 2, 2], [0.0, 1.0, 0.0, 1.0]), 0.5) == [False, False, True, True]


def test_a_last_bit_of_sigma_decides_nothing() -> None:
    larger_by_rounding = table([0, 0, 0, 0, 1, 1, 1], [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.5])  # both variances are 1/12
    assert top_spread(larger_by_rounding, 0.5) == [True] * 4 + [False] * 3
    assert (
        top_spread(table([0, 0, 0, 1, 1, 1, 1], [0.0, 0.0, 0.5, 0.0, 0.0, 0.5, 0.5]), 0.5) == [True] * 3 + [False] * 4
    )


@pytest.mark.parametrize(("gap", "kept"), [(1.0 + 1e-8, [False, True]), (1.0 + 1e-11, [True, False])])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_spreads_within_a_billionth_of_each_other_are_equal(gap: float, kept: list[bool], size: float) -> None:
    assert top_spread(table([0, 0, 1, 1], [0.0, size, 0.0, size * gap]), 0.5) == [kept[0]] * 2 + [kept[1]] * 2


def test_groups_without_a_member_left_are_no_part_of_the_share() -> None:
    made = table([0, 0, 1, 1, 2, 2], [0.0, 9.0, 0.0, 1.0, 0.0, 2.0], trains=[False, False, True, True, True, True])
    assert top_spread(made, 0.5) == [False] * 4 + [True] * 2


@pytest.mark.parametrize("groups", [10, 30, 70])
def test_a_tenth_is_a_tenth(groups: int) -> None:
    made = table([g for g in range(groups) for _ in "ab"], [float(x * g) for g in range(groups) for x in (0, 1)])
    assert sum(top_spread(made, 0.1)) == 2 * groups // 10


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.5])
def test_a_share_outside_zero_to_one_is_refused(keep: float) -> None:
    with pytest.raises(ValueError, match="keep"):
        TopSpreadConfig(keep)


def test_overlong_drops_single_trajectories() -> None:
    made = table([0, 0, 1], [0.0, 1.0, 2.0], stop=["length", "turns", "truncated"])
    assert Overlong(None, FilterContext()).keep(made).tolist() == [False, True, True]


@pytest.mark.parametrize("build", [NoSignal, TopSpread, Overlong])
def test_an_empty_table_gives_an_empty_answer(build: Any) -> None:
    keep = build(None, FilterContext()).keep(table([], []))
    assert keep.shape == (0,)
    assert keep.dtype == np.bool_


members = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), max_size=16)


@given(made=members, keep=st.sampled_from([0.2, 0.5, 1.0]))
def test_equals_the_definition_computed_by_loops(made: list[tuple[int, float, bool]], keep: float) -> None:
    groups = [g for g, _, _ in made]
    scores: dict[int, list[float]] = {}
    for g, score, trains in made:
        if trains:
            scores.setdefault(g, []).append(score)
    variance = {
        g: statistics.variance(map(Fraction, s)) if len(s) > 1 else Fraction(0) for g, s in scores.items()
    }  # exact: ties are ties
    given_table = table(groups, [s for _, s, _ in made], [t for _, _, t in made])
    assert no_signal(given_table) == [variance.get(g, 0) > Fraction(1, 10**12) for g in groups]
    best = sorted(variance, key=lambda g: (-variance[g], g))[: -int(-len(variance) * keep // 1)]
    assert top_spread(given_table, keep) == [g in best for g in groups]
