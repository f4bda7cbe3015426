"""Aggregation coefficients against the reference numbers and a loop that follows the definition word by word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import ConfigError
from turnwise.pipeline.aggregation import MODES, UNITS, token_coefficients


def objective(mode: str, unit: str, rows: list[list[float]], trajectory: list[int], **more: Any) -> float:
    """Σ coef·loss with the losses of `rows`, one list per row."""
    ids = more.get("ids", list(range(len(rows))))
    weights = more.get("weights", [1.0] * len(rows))
    coef = token_coefficients(
        mode,
        unit,
        np.array(ids),
        np.array(trajectory),
        np.array(weights),
        np.array([len(row) for row in rows]),
        more.get("scale", 8),
    )
    return sum(c * sum(row) for c, row in zip(coef, rows))


REFERENCE = {"trajectory": [1.8888889, 1.9166667, 8.5, 1.0625], "sample": [1.8888889, 1.8333333, 5.6666667, 0.7083333]}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("mode", range(4))
def test_reference_numbers(mode: int, unit: str) -> None:
    got = objective(MODES[mode], unit, [[1, 2], [3, 1, 2, 2], [4, 0, 2]], [0, 0, 1])
    assert got == pytest.approx(REFERENCE[unit][mode], abs=1e-6)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("mode", "expected"), [("seq-mean-token-mean", 1.75), ("seq-mean-token-sum", 4.5)])
def test_a_row_and_its_copy_at_half_weight_count_as_one(mode: str, expected: float, unit: str) -> None:
    got = objective(mode, unit, [[1, 2], [4, 0, 2], [1, 2]], [0, 1, 0], ids=[5, 9, 5], weights=[0.5, 1.0, 0.5])
    assert got == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("mode", MODES)
def test_a_trajectory_without_sampled_tokens_changes_nothing(mode: str, unit: str) -> None:
    rows: list[list[float]] = [[1, 2], [3, 1, 2, 2], [4, 0, 2]]
    assert objective(mode, unit, [*rows, [], []], [0, 0, 1, 2, 2]) == pytest.approx(
        objective(mode, unit, rows, [0, 0, 1])
    )


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_sampled_tokens_has_no_objective(mode: str, unit: str) -> None:
    nothing = np.zeros(0, np.int64)
    assert token_coefficients(
        mode, unit, np.arange(2), np.arange(2), np.ones(2), np.zeros(2, np.int64), 8
    ).tolist() == [0, 0]
    assert token_coefficients(mode, unit, nothing, nothing, np.zeros(0), nothing, 8).tolist() == []


def slow_objective(
    mode: str,
    unit: str,
    rows: list[list[float]],
    trajectory: list[int],
    ids: list[int],
    weights: list[float],
    scale: float,
) -> float:
    units = trajectory if unit == "trajectory" else ids
    sums, tokens, unit_weights = [], [], []
    for u in sorted(set(units)):
        mine = [r for r in range(len(rows)) if units[r] == u]
        sums.append(sum(weights[r] * sum(rows[r]) for r in mine))
        tokens.append(sum(weights[r] * len(rows[r]) for r in mine))
        heaviest = max(sum(weights[r] for r in mine if ids[r] == row) for row in {ids[r] for r in mine})
        unit_weights.append(heaviest if tokens[-1] > 0 else 0.0)
    if sum(tokens) == 0:
        return 0.0
    if mode == "token-mean":
        return sum(sums) / sum(tokens)
    if mode == "seq-mean-token-mean":
        return sum(w * s / n for w, s, n in zip(unit_weights, sums, tokens) if n > 0) / sum(unit_weights)
    if mode == "seq-mean-token-sum":
        return sum(sums) / sum(unit_weights)
    return sum(sums) / (scale * sum(unit_weights))


@given(
    data=st.data(),
    rows=st.lists(st.lists(st.floats(-5, 5), max_size=4), min_size=1, max_size=6),
    mode=st.sampled_from(MODES),
    unit=st.sampled_from(UNITS),
)
def test_equals_the_definition_with_copies_and_in_any_order(
    data: st.DataObject, rows: list[list[float]], mode: str, unit: str
) -> None:
    owner = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    copies = data.draw(st.lists(st.integers(1, 3), min_size=len(rows), max_size=len(rows)))
    elsewhere = data.draw(
        st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))
    )  # copies that fell into another update
    drawn = [(r, 1.0 / (copies[r] + elsewhere[r])) for r in range(len(rows)) for _ in range(copies[r])]
    drawn = data.draw(st.permutations(drawn))
    ids, weights = [r for r, _ in drawn], [w for _, w in drawn]
    losses, trajectory = [rows[r] for r in ids], [owner[r] for r in ids]
    got = objective(mode, unit, losses, trajectory, ids=ids, weights=weights, scale=8)
    assert got == pytest.approx(slow_objective(mode, unit, losses, trajectory, ids, weights, 8), rel=1e-9, abs=1e-9)


@given(data=st.data(), mode=st.sampled_from(MODES), unit=st.sampled_from(UNITS))
def test_merging_a_trajectorys_rows_keeps_the_objective(data: st.DataObject, mode: str, unit: str) -> None:
    if unit == "sample":
        mode = "token-mean"
    turns = data.draw(
        st.lists(
            st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=3), min_size=1, max_size=4), min_size=1, max_size=4
        )
    )
    apart = [(row, t) for t, rows in enumerate(turns) for row in rows]
    merged = [([x for row in rows for x in row], t) for t, rows in enumerate(turns)]
    one, other = (objective(mode, unit, [row for row, _ in some], [t for _, t in some]) for some in (apart, merged))
    assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("mode", "unit", "scale", "line"),
    [
        ("token_mean", "trajectory", 1, r"loss_agg_mode: 'token_mean' is unknown\. Did you mean 'token-mean'\?"),
        ("token-mean", "row", 1, "loss_agg_unit: 'row' is unknown. Known: sample, trajectory"),
        ("seq-mean-token-sum-norm", "sample", 0, "loss_scale_factor: 0 is not a positive number"),
    ],
)
def test_wrong_settings_are_reported(mode: str, unit: str, scale: float, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        token_coefficients(mode, unit, np.arange(1), np.arange(1), np.ones(1), np.ones(1, np.int64), scale)
