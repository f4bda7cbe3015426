"""What every group filter keeps: one bool per trajectory, a function of the table."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.group_filter import FilterContext
from turnwise.testing.compare import changed, global_random_state, same
from turnwise.testing.subject import Subject
from turnwise.testing.synthetic import batch_of, trajectories

KIND = "group_filter"


def test_it_gives_one_bool_per_trajectory(implementation: Subject) -> None:
    """Bool [trajectories], of an empty table too."""
    group_filter = implementation.build(FilterContext())
    for made in (trajectories(), trajectories(members=1), trajectories(rewards=(0.5,)), []):
        table = batch_of(made).trajectories
        keep = group_filter.keep(table)
        assert keep.shape == (len(table),), f"{len(table)} trajectories gave a result of shape {keep.shape}."
        assert keep.dtype == np.bool_, f"the result is {keep.dtype}, not bool."


def test_it_is_deterministic_and_leaves_the_table_as_it_was(implementation: Subject) -> None:
    """What it drops stays in the metrics as it was."""
    table = batch_of(trajectories()).trajectories
    before, state = {name: column.copy() for name, column in table.items()}, global_random_state()
    first, second = (implementation.build(FilterContext(seed=3)).keep(table) for _ in range(2))
    assert same(first, second), "two filters of one seed differ on one table."
    assert same(before, dict(table.items())), "keep changed a column of the table in place."
    assert not changed(state, global_random_state()), (
        "the global random state was used. Fix: np.random.default_rng(context.seed)."
    )
