"""The batch-adjust policies: sizes, weights, nothing invented, determinism, and the learning-rate budget of a real
run."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.schema import Choice, EnvManagerConfig, Role, RunConfig, TrainingArgs
from turnwise.contracts.batch_adjust import AdjustContext, AdjustInput, PlannedUpdate
from turnwise.contracts.train import StrategyCapabilities
from turnwise.errors import ConfigError, Problem
from turnwise.planning.schedules import Schedule, learning_rate
from turnwise.testing.compare import says
from turnwise_batching import batch_adjusts
from turnwise_batching.config import ByTrajectoryConfig

BY_ROW = ["copy", "delete", "random_sample", "auto", "none"]


def build(name: str, unit: int, rollout_batch_size: int = 64) -> Any:
    implementation = next(i for i in batch_adjusts() if i.name == name)
    found = []
    for target in (implementation.config, implementation.target):
        module, attribute = target.split(":")
        found.append(getattr(importlib.import_module(module), attribute))
    return found[1](found[0](), AdjustContext(unit=unit, rollout_batch_size=rollout_batch_size))


def rows_input(n: int, seed: int = 0) -> AdjustInput:
    return AdjustInput(trajectory=np.arange(n, dtype=np.int64), trajectories=n, seed=seed)


def sizes(plan: list[PlannedUpdate]) -> list[int]:
    return [len(update.rows) for update in plan]


def flat(plan: list[PlannedUpdate]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([u.rows for u in plan]), np.concatenate([u.weights for u in plan])


def test_the_plugin_offers_the_six_policies() -> None:
    assert sorted(i.name for i in batch_adjusts()) == sorted(["by_trajectory", *BY_ROW])


@pytest.mark.parametrize(
    ("name", "n", "unit", "expected"),
    [
        ("copy", 10, 4, [4, 4, 4]),
        ("copy", 8, 4, [4, 4]),
        ("copy", 3, 16, [16]),
        ("delete", 10, 4, [4, 4]),
        ("delete", 8, 4, [4, 4]),
        ("delete", 3, 4, [4]),
        ("random_sample", 10, 4, [4]),
        ("random_sample", 8, 4, [4]),
        ("random_sample", 3, 4, [4]),
        ("auto", 9, 4, [4, 4]),
        ("auto", 10, 4, [4, 4, 4]),  # t = U/2: copy
        ("auto", 7, 5, [5]),  # t = 2 < 2.5: delete
        ("auto", 8, 5, [5, 5]),
        ("auto", 1, 4, [4]),
        ("auto", 8, 4, [4, 4]),
        ("none", 10, 4, [4, 4, 2]),
        ("none", 8, 4, [4, 4]),
        ("none", 3, 4, [3]),
    ],
)
def test_sizes_of_the_updates(name: str, n: int, unit: int, expected: list[int]) -> None:
    policy = build(name, unit)
    assert sizes(policy.plan(rows_input(n))) == expected
    assert policy.updates(n) == len(expected)


@pytest.mark.parametrize("name", BY_ROW)
@given(n=st.integers(1, 60), unit=st.integers(1, 24), seed=st.integers(0, 2**40))
def test_plans_invent_nothing_are_deterministic_and_keep_their_promise(name: str, n: int, unit: int, seed: int) -> None:
    policy = build(name, unit)
    plan = policy.plan(rows_input(n, seed))
    again = build(name, unit).plan(rows_input(n, seed))
    assert len(plan) == policy.updates(n)
    rows, weights = flat(plan)
    assert rows.dtype == np.int64
    assert weights.dtype == np.float64
    assert set(rows.tolist()) <= set(range(n))
    assert np.array_equal(rows, flat(again)[0])
    assert np.array_equal(weights, flat(again)[1])
    per_row = np.bincount(rows, weights=weights, minlength=n)
    kept = np.bincount(rows, minlength=n) > 0
    np.testing.assert_allclose(per_row[kept], 1.0)
    np.testing.assert_allclose(weights, 1.0 / np.bincount(rows)[rows])
    if name != "none":
        assert set(sizes(plan)) == {unit}


@given(n=st.integers(1, 60), unit=st.integers(1, 24), seed=st.integers(0, 2**40))
def test_copy_and_none_lose_no_row_and_delete_loses_only_the_remainder(n: int, unit: int, seed: int) -> None:
    counts = {
        name: np.bincount(flat(build(name, unit).plan(rows_input(n, seed)))[0], minlength=n)
        for name in ("copy", "none", "delete")
    }
    assert counts["copy"].min() >= 1
    assert counts["copy"].sum() == math.ceil(n / unit) * unit
    assert counts["copy"].max() - counts["copy"].min() <= 1
    assert (counts["none"] == 1).all()
    if n >= unit:
        assert counts["delete"].max() == 1
        assert (counts["delete"] == 0).sum() == n % unit


def test_copied_and_dropped_rows_are_random_and_depend_on_the_seed() -> None:
    copied = {
        tuple(np.flatnonzero(np.bincount(flat(build("copy", 8).plan(rows_input(15, s)))[0]) > 1)) for s in range(40)
    }
    dropped = {
        tuple(set(range(17)) - set(flat(build("delete", 8).plan(rows_input(17, s)))[0].tolist())) for s in range(60)
    }
    assert len(copied) > 8
    assert len(dropped) > 8


@pytest.mark.parametrize("name", ["by_trajectory", *BY_ROW])
def test_without_any_row_there_is_no_update(name: str) -> None:
    assert build(name, 4).plan(AdjustInput(trajectory=np.zeros(0, np.int64), trajectories=3, seed=1)) == []


@given(
    turns=st.lists(st.integers(0, 12), min_size=1, max_size=32).filter(any),
    seed=st.integers(0, 2**40),
    parts=st.sampled_from([1, 2, 4, 8]),
    random=st.randoms(use_true_random=False),
)
def test_by_trajectory_deals_whole_trajectories_into_equal_parts(
    turns: list[int], seed: int, parts: int, random: Any
) -> None:
    owner = [i for i, n in enumerate(turns) for _ in range(n)]
    random.shuffle(owner)
    trajectory = np.array(owner, np.int64)
    policy = build("by_trajectory", unit=32 // parts, rollout_batch_size=32)
    rows = AdjustInput(trajectory=trajectory, trajectories=len(turns), seed=seed)
    plan = policy.plan(rows)
    assert len(plan) == policy.updates(len(trajectory)) == policy.updates(10 * len(trajectory)) == parts
    everything, weights = flat(plan)
    assert sorted(everything.tolist()) == list(range(len(trajectory)))
    assert (weights == 1.0).all()
    dealt = [set(trajectory[u.rows].tolist()) for u in plan]
    assert sum(len(mine) for mine in dealt) == len(set(owner))
    assert max(len(mine) for mine in dealt) <= math.ceil(len(turns) / parts)
    if all(turns):
        assert min(len(mine) for mine in dealt) >= len(turns) // parts
    for update, again in zip(plan, policy.plan(rows)):
        assert np.array_equal(update.rows, again.rows)


def test_by_trajectory_counts_trajectories_without_rows_as_dealt() -> None:
    plans = [build("by_trajectory", 2, 4).plan(AdjustInput(np.array([0, 0, 1]), 4, seed)) for seed in range(40)]
    assert {len(plan) for plan in plans} == {2}
    assert [0, 3] in [
        sorted(sizes(plan)) for plan in plans
    ]  # the two that have no rows may meet in one update, which is then empty
    assert [1, 2] in [sorted(sizes(plan)) for plan in plans]


def test_by_trajectory_deals_anew_under_another_seed() -> None:
    firsts = {
        tuple(sorted(build("by_trajectory", 4, 8).plan(rows_input(8, seed))[0].rows.tolist())) for seed in range(30)
    }
    assert len(firsts) > 10


def test_by_trajectory_needs_a_unit_that_divides_the_rollout_batch() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout_batch_size 64 is not a multiple of the effective batch U = .* = 48"
    ):
        build("by_trajectory", 48)
    with pytest.raises(ConfigError, match="64 is not a multiple"):
        build("by_trajectory", 128)


@pytest.mark.parametrize("name", ["by_trajectory", *BY_ROW])
def test_a_unit_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="effective batch U"):
        build(name, 0)


def regression_rows() -> list[int]:
    """Rows of each of 200 pipeline steps, one per turn, of a run whose rollout batch and U were 16; a remainder is
    copied full."""
    updates = {p: 2 for span in (range(22, 32), range(65, 70), range(109, 116), range(124, 156)) for p in span}
    updates |= {2: 15, 21: 20, 64: 11, 108: 12, 123: 6}
    return [16 * updates.get(p, 1) - (p % 5) for p in range(200)]


def rates_of(policy: Any, rows: list[int]) -> list[list[float]]:
    out = []
    for p, n in enumerate(rows):
        plan = policy.plan(AdjustInput(trajectory=np.arange(n) % 16, trajectories=16, seed=p))
        assert len(plan) == policy.updates(n)
        out.append([learning_rate(1.0, Schedule("linear"), p, k, len(plan), 200) for k in range(len(plan))])
    return out


def test_the_313_updates_of_a_real_run_all_learn_and_by_trajectory_makes_200() -> None:
    rates = rates_of(build("copy", 16, 16), regression_rows())
    everything = [rate for step in rates for rate in step]
    assert len(everything) == 313
    assert [sum(len(step) for step in rates[: p + 1]) for p in (0, 2, 21, 64, 108, 123)] == [1, 17, 55, 118, 178, 205]
    assert min(everything) == everything[-1] == pytest.approx(0.005)
    assert rates[123] == pytest.approx([0.385, 0.3841667, 0.3833333, 0.3825, 0.3816667, 0.3808333], abs=1e-7)
    budgeted = [step[0] for step in rates_of(build("by_trajectory", 16, 16), regression_rows())]
    assert budgeted == pytest.approx([1 - p / 200 for p in range(200)])


@frozen
class Split:
    """Options of a strategy that splits a model over two devices."""

    capabilities = StrategyCapabilities(data_parallel_size=lambda world: world // 2)


def checked(steps: int, *, batch: int = 16, devices: int = 0, critic: int | None = None) -> list[Problem]:
    def role(size: int) -> Role:
        args = TrainingArgs(per_device_train_batch_size=size, gradient_accumulation_steps=steps)
        return Role(
            training_args=args,
            device_mapping=tuple(range(devices)),
            strategy_args=Choice("split", {}, Split() if devices else None),
        )

    config = RunConfig(
        max_steps=1,
        rollout_batch_size=batch,
        pretrain="m",
        train_env_manager=EnvManagerConfig(),
        custom_envs={},
        actor_train=role(2),
        critic=role(critic) if critic else None,
    )
    return list(ByTrajectoryConfig().check(config))


def test_by_trajectory_says_before_a_run_which_accumulation_divides_the_batch() -> None:
    assert checked(4) == []
    (problem,) = checked(3)
    assert problem.path == "$.actor_train.training_args.gradient_accumulation_steps"
    factors = "per_device_train_batch_size 2 × gradient_accumulation_steps 3 × data-parallel size 1 = 6"
    says(problem.text, factors, "does not divide rollout_batch_size 16", "Fix: gradient_accumulation_steps: 2")
    assert "gradient_accumulation_steps 3 × data-parallel size 2 = 12 does not divide" in checked(3, devices=4)[0].text
    assert checked(4, devices=4) == []
    (problem,) = checked(1, critic=5)
    assert problem.path.startswith("$.critic.") and "U = per_device_train_batch_size 5 ×" in problem.text
