"""What every estimator keeps: advantages on sampled tokens alone, finite, and the same however groups are numbered, rows
are cut, and whatever was filtered out."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve

from turnwise.contracts.estimator import EstimatorCapabilities, EstimatorContext
from turnwise.data.batch import Batch
from turnwise.data.normalise import RewardNormalization
from turnwise.data.trajectory import Trajectory
from turnwise.testing.compare import same
from turnwise.testing.subject import Subject
from turnwise.testing.synthetic import Cut, batch_of, one_row, row_per_turn, trajectories

KIND = "advantage_estimator"


def build(implementation: Subject) -> Any:
    """The estimator with its context, or the default one."""
    return implementation.build(implementation.supplied.get("context", EstimatorContext()))


def prepared(implementation: Subject, made: list[Trajectory], cut: Cut = one_row) -> Batch:
    """The batch with every column that the estimator needs, equal for equal trajectories whatever the rows."""
    batch = batch_of(made, cut)
    order = batch.tokens["trajectory"][batch.sampled]
    for name in sorted(implementation.capabilities(EstimatorCapabilities).needs - set(batch.tokens)):
        column = np.zeros(len(batch.tokens))
        for row, (seed, member) in enumerate(zip(batch.trajectories["seed"], batch.trajectories["member"])):
            mine = batch.sampled[order == row]
            # Drawn by what identifies a trajectory: renumbered groups and other cuts get the same values.
            column[mine] = np.random.default_rng([int(seed), int(member)]).standard_normal(len(mine))
        batch = batch.with_tokens(**{name: column})
    return batch


def by_trajectory(batch: Batch, values: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
    """Values of the sampled tokens in turn order, by (seed, member)."""
    order = batch.tokens["trajectory"][batch.sampled]
    keys = zip(batch.trajectories["seed"], batch.trajectories["member"])
    return {(int(seed), int(member)): values[batch.sampled[order == row]] for row, (seed, member) in enumerate(keys)}


def test_shapes_and_types(implementation: Subject) -> None:
    """Float64 [tokens], advantages and returns."""
    estimator = build(implementation)
    assert isinstance(implementation.capabilities(EstimatorCapabilities).needs, frozenset)
    assert isinstance(estimator.token_rewards, bool)
    assert isinstance(estimator.whiten, bool)
    assert estimator.normalization is None or isinstance(estimator.normalization, RewardNormalization)
    batch = prepared(implementation, trajectories())
    for name, values in zip(("advantages", "returns"), estimator.compute(batch)):
        assert values.shape == (len(batch.tokens),), (
            f"{name} have the shape {values.shape}; one value per token is {len(batch.tokens)}."
        )
        assert values.dtype == np.float64, f"{name} are {values.dtype}; statistics are taken in float64."
        assert np.isfinite(values).all(), f"{name} hold NaN or infinity."


def test_nothing_stands_outside_the_mask(implementation: Subject) -> None:
    """Prompts and padding have no advantage."""
    estimator = build(implementation)
    # In one row prompts stand between the turns, in a row per turn before them: both leave places outside the mask.
    for cut in (one_row, row_per_turn):
        batch = prepared(implementation, trajectories(), cut)
        for name, values in zip(("advantages", "returns"), estimator.compute(batch)):
            leaked = values[~batch.tokens["response_mask"]]
            assert not leaked.any(), (
                f"{int((leaked != 0).sum())} tokens that were not sampled have {name}. Fix: multiply with the response"
                " mask."
            )


def test_the_numbers_of_the_groups_do_not_matter(implementation: Subject) -> None:
    """A group's number is its name: renumbered, it gets the same advantages."""
    estimator = build(implementation)
    made = trajectories(groups=4)
    # Another order of the groups, and so of all rows.
    swapped = [evolve(t, group=(2, 0, 3, 1)[t.group]) for t in made]
    results = []
    for batch in (prepared(implementation, made), prepared(implementation, swapped)):
        results.append([by_trajectory(batch, values) for values in estimator.compute(batch)])
    for name, first, second in zip(("advantages", "returns"), *results):
        for key, values in first.items():
            np.testing.assert_allclose(
                second[key], values, rtol=1e-6, atol=1e-9, err_msg=f"{name} change when groups are renumbered."
            )


def test_the_rows_do_not_matter(implementation: Subject) -> None:
    """A trajectory counts once, in however many rows it is cut."""
    estimator = build(implementation)
    whole, cut = (prepared(implementation, trajectories(), how) for how in (one_row, row_per_turn))
    for name, first, second in zip(("advantages", "returns"), estimator.compute(whole), estimator.compute(cut)):
        message = (
            f"{name} differ between one row per trajectory and one row per turn. Fix: recurse over batch.sampled, not"
            " over rows."
        )
        np.testing.assert_allclose(second[cut.sampled], first[whole.sampled], rtol=1e-6, atol=1e-9, err_msg=message)


def test_what_a_filter_dropped_has_no_influence(implementation: Subject) -> None:
    """Neither in a baseline, nor with an advantage of its own."""
    estimator = build(implementation)
    made = trajectories()
    # One member of every group, and a whole group.
    kept = [t for t in made if t.member != 1 and t.group != 2]
    alone = prepared(implementation, kept)
    trains = np.array([t.member != 1 and t.group != 2 for t in made])
    filtered = prepared(implementation, made).with_trajectories(trains=trains)
    results = zip(("advantages", "returns"), estimator.compute(alone), estimator.compute(filtered))
    for name, wanted, found in results:
        got = by_trajectory(filtered, found)
        for key, values in by_trajectory(alone, wanted).items():
            message = (
                f"{name} change with trajectories that a group filter has dropped. Fix: leave them out of every mean and"
                " spread; turnwise.data.ops.trains(batch) tells which train."
            )
            np.testing.assert_allclose(got[key], values, rtol=1e-6, atol=1e-9, err_msg=message)
        dropped = found[~trains[filtered.tokens["trajectory"]]]
        assert not dropped.any(), (
            f"trajectories that a group filter has dropped have {name}. Fix: 0 there, as the helpers of"
            " turnwise.data.ops write it."
        )


def test_the_members_of_another_role_are_another_group(implementation: Subject) -> None:
    """Two players of a game have scores that nobody may average."""
    estimator = build(implementation)
    # Two players of every episode; seeds of their own, by which the trajectories are told apart here.
    first = [evolve(t, role="first") for t in trajectories()]
    second = [evolve(t, role="second", seed=t.seed + 5000) for t in trajectories(seed=1)]
    renumbered = [evolve(t, role="", group=2 * t.group + (t.role == "second")) for t in (*first, *second)]
    results = []
    for batch in (prepared(implementation, [*first, *second]), prepared(implementation, renumbered)):
        results.append([by_trajectory(batch, values) for values in estimator.compute(batch)])
    for name, roles, groups in zip(("advantages", "returns"), *results):
        for key, values in groups.items():
            message = (
                f"{name} mix the roles of an episode. Fix: compare by the column traj_group_id, which numbers group and"
                " role, and not by group."
            )
            np.testing.assert_allclose(roles[key], values, rtol=1e-6, atol=1e-9, err_msg=message)


def test_groups_of_one_and_groups_without_variance_are_finite(implementation: Subject) -> None:
    """Where a spread is zero nothing is divided by it."""
    estimator = build(implementation)
    for case, made in {
        "groups of one": trajectories(members=1),
        "equal rewards": trajectories(rewards=(0.7,)),
        "no reward at all": trajectories(rewards=(0.0,)),
        "one trajectory": trajectories(groups=1, members=1),
        "a trajectory without turns alone": [trajectories(groups=1, members=2)[1]],
    }.items():
        for values in estimator.compute(prepared(implementation, made)):
            assert np.isfinite(values).all(), f"{case}: the result is not finite."


def test_it_is_deterministic_and_leaves_the_batch_as_it_was(implementation: Subject) -> None:
    """Who comes after it reads the same batch."""
    estimator = build(implementation)
    batch = prepared(implementation, trajectories())
    tables = [batch.trajectories, batch.turns, batch.samples, batch.tokens]
    before = [{name: column.copy() for name, column in table.items()} for table in tables]
    first, second = estimator.compute(batch), estimator.compute(batch)
    assert same(first, second), "two calls on one batch differ."
    assert same(before, [dict(table.items()) for table in tables]), "compute changed a column of the batch in place."
