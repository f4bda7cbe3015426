"""What every batch-adjust policy keeps: it invents no row, is a function of its input, and `updates` says what `plan`
does."""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.contracts.batch_adjust import AdjustContext, AdjustInput
from turnwise.testing.compare import changed, global_random_state, same
from turnwise.testing.subject import Subject

KIND = "batch_adjust"
TRAJECTORIES = 8
CASES = [(unit, rows) for unit in (2, 4, 8) for rows in (1, 3, 8, 13, 16, 40)]


def given(rows: int, seed: int = 0) -> AdjustInput:
    """`rows` rows dealt unevenly to trajectories, some of which have none."""
    # The last trajectory never owns a row: a policy that counts owners finds one fewer than there are.
    owner = np.sort(np.random.default_rng(rows).integers(0, TRAJECTORIES - 1, rows)).astype(np.int64)
    return AdjustInput(trajectory=owner, trajectories=TRAJECTORIES, seed=seed)


@pytest.mark.parametrize(("unit", "rows"), CASES)
def test_it_invents_nothing(implementation: Subject, unit: int, rows: int) -> None:
    """Rows of an update are the batch's, weights finite and not negative."""
    for update in implementation.build(AdjustContext(unit, TRAJECTORIES)).plan(given(rows)):
        assert update.rows.dtype.kind == "i", f"rows are {update.rows.dtype}, not integers."
        assert ((update.rows >= 0) & (update.rows < rows)).all(), f"a row outside 0…{rows - 1} was planned."
        assert update.rows.shape == update.weights.shape, "rows and weights differ in length."
        assert np.isfinite(update.weights).all(), "a weight is not finite."
        assert (update.weights >= 0).all(), "a weight is negative."


@pytest.mark.parametrize(("unit", "rows"), CASES)
def test_updates_says_how_many_plan_makes(implementation: Subject, unit: int, rows: int) -> None:
    """By which learning rates are planned before the run."""
    policy = implementation.build(AdjustContext(unit, TRAJECTORIES))
    planned = len(policy.plan(given(rows)))
    assert policy.updates(rows) == planned, (
        f"unit {unit}, {rows} rows: updates() says {policy.updates(rows)}, plan() made {planned}."
    )


def test_it_is_deterministic_under_the_seed_alone(implementation: Subject) -> None:
    """A resumed run makes the same updates."""
    before = global_random_state()
    plans = []
    for _ in range(2):
        policy = implementation.build(AdjustContext(4, TRAJECTORIES))
        # A plan before the one that counts: a generator kept from call to call would show in the second.
        policy.plan(given(7, seed=9))
        plans.append([(update.rows, update.weights) for update in policy.plan(given(13, seed=5))])
    assert same(plans[0], plans[1]), "two plans of one input and seed differ."
    assert not changed(before, global_random_state()), (
        "the global random state was used. Fix: np.random.default_rng(rows.seed)."
    )


def test_no_rows_make_no_rows(implementation: Subject) -> None:
    """A step in which nothing was played."""
    plan = implementation.build(AdjustContext(4, TRAJECTORIES)).plan(given(0))
    assert all(len(update.rows) == 0 for update in plan), "a step without rows was given some."
