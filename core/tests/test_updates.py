"""The step's updates: rows, coefficients, epochs and learning rates, each against a slow reference; and as many as the
plan says."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from turnwise.config.schema import Choice, CoefRange, CustomEnv, EnvManagerConfig, Role, RunConfig, TrainingArgs
from turnwise.contracts.batch_adjust import AdjustContext, AdjustInput, PlannedUpdate
from turnwise.data.batch import Batch
from turnwise.data.rows import Update
from turnwise.data.trajectory import Trajectory
from turnwise.pipeline.updates import coefficient, derive, plan_step, training_rows, updates
from turnwise.planning import plan as planning
from turnwise.planning.schedules import schedule_of
from turnwise.plugins import registry
from turnwise.testing.registered import registered
from turnwise.testing.synthetic import batch_of, one_row, played, row_per_turn, trajectories

FAKES = "turnwise.testing.plugin"


@pytest.fixture(autouse=True)
def _fakes() -> Iterator[None]:
    with registered(plugins=[FAKES]):
        yield


def settings(**changes: Any) -> RunConfig:
    base = RunConfig(
        max_steps=4,
        rollout_batch_size=12,
        pretrain="fake",
        train_env_manager=EnvManagerConfig(num_env_groups=4, group_size=3, tags=("T",), num_groups_partition=(4,)),
        custom_envs={"T": CustomEnv("fake", max_steps=5, env_manager=Choice("fake_manager"))},
    )
    return evolve(base, **changes)


def trained(**args: Any) -> Role:
    return Role(training_args=TrainingArgs(**args))


def ready(batch: Batch) -> Batch:
    return batch.with_tokens(
        advantages=np.zeros(len(batch.tokens)), old_log_probs=np.zeros(len(batch.tokens), np.float32)
    )


@frozen
class Deals:
    """A policy that deals the rows as they come into updates of `size`, and remembers what it was given."""

    size: int
    asked: list[AdjustInput]

    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        self.asked.append(rows)
        order = np.arange(len(rows.trajectory))
        return [
            PlannedUpdate(order[i : i + self.size], np.ones(len(order[i : i + self.size])))
            for i in range(0, len(order), self.size)
        ]

    def updates(self, rows: int) -> int:
        return -(-rows // self.size)


def ids_of(update: Update) -> list[list[int]]:
    """The token ids of an update's rows."""
    offsets = update.rows.offsets
    return [update.rows.input_ids[a:b].tolist() for a, b in pairwise(offsets)]


# ---------------------------------------------------------------- rows and coefficients


def slow_coefficients(mode: str, unit: str, rows: list[tuple[int, int, float, int]], scale: float) -> list[float]:
    """Per row (id, trajectory, weight, tokens): the factor of its losses by the formulas of the modes, in fractions."""
    units: dict[int, list[tuple[int, int, float, int]]] = {}
    for row in rows:
        units.setdefault(row[1] if unit == "trajectory" else row[0], []).append(row)
    tokens = {u: sum(Fraction(w) * n for _, _, w, n in mine) for u, mine in units.items()}
    heaviest = {
        u: max(sum(Fraction(w) for i, _, w, _ in mine if i == one[0]) for one in mine) if tokens[u] else Fraction(0)
        for u, mine in units.items()
    }
    out = []
    for row_id, trajectory, weight, _ in rows:
        u = trajectory if unit == "trajectory" else row_id
        factor = {
            "token-mean": Fraction(1) / sum(tokens.values()),
            "seq-mean-token-mean": heaviest[u] / (tokens[u] or 1) / sum(heaviest.values()),
            "seq-mean-token-sum": Fraction(1) / sum(heaviest.values()),
            "seq-mean-token-sum-norm": Fraction(1) / sum(heaviest.values()) / Fraction(scale),
        }[mode]
        out.append(float(Fraction(weight) * factor))
    return out


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("unit", ["trajectory", "sample"])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_every_update_carries_its_rows_and_the_coefficients_over_the_whole_of_it(
    mode: str, unit: str, scale: float | None
) -> None:
    batch = ready(batch_of(trajectories(4, 3), row_per_turn))
    config = settings(loss_agg_mode=mode, loss_agg_unit=unit, loss_scale_factor=scale, sequence_length=64)
    drawn = np.random.default_rng(0).integers(0, len(batch.samples), (3, 7))  # some rows twice
    planned = [PlannedUpdate(rows, 1.0 / np.bincount(rows)[rows]) for rows in drawn]
    made = list(updates(batch, planned, config, trained(), 0, 0.0))
    assert len(made) == 3
    start, length = batch.samples["start"], batch.samples["length"]
    for rows, update in zip(drawn, made):
        assert ids_of(update) == [batch.tokens["input_ids"][start[r] : start[r] + length[r]].tolist() for r in rows]
        sampled = [int(batch.tokens["response_mask"][start[r] : start[r] + length[r]].sum()) for r in rows]
        weights = [1.0 / (rows == r).sum() for r in rows]
        table = list(zip(rows.tolist(), batch.samples["trajectory"][rows].tolist(), weights, sampled))
        expected = slow_coefficients(mode, unit, table, scale or 64)
        np.testing.assert_allclose(update.rows.columns["coef"], np.repeat(expected, sampled), rtol=1e-12)
        np.testing.assert_allclose(update.rows.columns["weight"], np.repeat(weights, sampled), rtol=1e-12)


def test_rows_carry_every_token_column_and_the_score_and_group_of_their_trajectory() -> None:
    batch = ready(batch_of(trajectories(3, 2), row_per_turn)).with_tokens(
        mine=np.arange(len(batch_of(trajectories(3, 2), row_per_turn).tokens))
    )
    rows = training_rows(batch)
    mask = batch.tokens["response_mask"]
    owner = batch.tokens["trajectory"][mask]
    np.testing.assert_array_equal(rows.columns["mine"], np.flatnonzero(mask))
    np.testing.assert_array_equal(rows.columns["scores"], batch.trajectories["scores"][owner])
    np.testing.assert_array_equal(rows.columns["group"], batch.trajectories["group"][owner])
    assert {"advantages", "old_log_probs", "infer_log_probs", "versions", "trajectory", "turn", "sample"} <= set(
        rows.columns
    )


def test_every_token_knows_the_mean_advantage_of_its_whole_trajectory() -> None:
    batch = batch_of(trajectories(3, 3), row_per_turn)
    assert "trajectory_advantages" not in training_rows(batch).columns
    values = np.where(batch.tokens["response_mask"], np.random.default_rng(0).normal(size=len(batch.tokens)), 0.0)
    rows = training_rows(batch.with_tokens(advantages=values))
    for t in np.unique(rows.columns["trajectory"]):
        mine = rows.columns["trajectory"] == t
        assert len(set(rows.columns["trajectory_advantages"][mine])) == 1
        assert rows.columns["trajectory_advantages"][mine][0] == pytest.approx(rows.columns["advantages"][mine].mean())


def test_coefficients_of_the_step_travel_with_each_update() -> None:
    batch = ready(batch_of(trajectories(2, 2)))
    config = settings(entropy_loss_coef=CoefRange(0.4, 0.0))
    planned = plan_step(batch, Deals(2, []), 0, 0)
    for step, expected in enumerate([0.4, 0.3, 0.2, 0.1]):
        made = list(updates(batch, planned, config, trained(), step, 0.07))
        assert [(pytest.approx(expected), 0.07)] * len(made) == [(u.entropy_coef, u.kl_coef) for u in made]
    assert coefficient(0.5, 3, 4) == 0.5


def test_filtered_trajectories_give_no_rows_but_are_reported_as_arrived() -> None:
    batch = ready(batch_of(trajectories(4, 3), row_per_turn))
    keep = batch.trajectories["group"] % 2 == 0
    policy = Deals(3, [])
    planned = plan_step(batch.with_trajectories(trains=keep), policy, 0, 0)
    used = np.concatenate([p.rows for p in planned])
    assert used.tolist() == np.flatnonzero(keep[batch.samples["trajectory"]]).tolist()
    assert policy.asked[0].trajectories == 12
    np.testing.assert_array_equal(policy.asked[0].trajectory, batch.samples["trajectory"][used])
    nothing = plan_step(batch.with_trajectories(trains=np.zeros(12, np.bool_)), policy, 0, 0)
    assert list(updates(batch, nothing, settings(ppo_epochs=2), trained(), 0, 0.0)) == []


# ---------------------------------------------------------------- epochs and seeds


def test_epochs_permute_whole_updates_and_never_their_rows() -> None:
    batch = ready(batch_of(trajectories(8, 3), row_per_turn))
    config = settings(ppo_epochs=3)
    planned = plan_step(batch, Deals(4, []), config.seed, 2)
    made = [ids_of(u) for u in updates(batch, planned, config, trained(), 2, 0.0)]
    n = len(planned)
    first = made[:n]
    start, length = batch.samples["start"], batch.samples["length"]
    assert first == [
        [batch.tokens["input_ids"][start[r] : start[r] + length[r]].tolist() for r in p.rows] for p in planned
    ]
    later = [made[n : 2 * n], made[2 * n :]]
    for epoch in later:
        assert sorted(epoch) == sorted(first)
        assert epoch != first
    assert later[0] != later[1]
    assert made == [ids_of(u) for u in updates(batch, planned, config, trained(), 2, 0.0)]
    assert made != [ids_of(u) for u in updates(batch, planned, evolve(config, seed=1), trained(), 2, 0.0)]
    assert made != [ids_of(u) for u in updates(batch, planned, config, trained(), 3, 0.0)]


def test_the_policys_seed_follows_from_run_and_step() -> None:
    batch, policy = ready(batch_of(trajectories(2, 2))), Deals(2, [])
    for seed, step in ((0, 0), (0, 0), (0, 1), (1, 0), (-1, 0)):
        plan_step(batch, policy, seed, step)
    seeds = [asked.seed for asked in policy.asked]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_of_different_purposes_and_places_differ() -> None:
    seeds = [
        derive(7, purpose, *where) for purpose in ("adjust", "epoch") for where in ((0,), (1,), (0, 0), (0, 1), (1, 0))
    ]
    assert len(set(seeds)) == len(seeds)
    assert derive(7, "adjust", 3) == derive(7, "adjust", 3)


# ---------------------------------------------------------------- learning rates


def rates_of_a_run(config: RunConfig, role: Role, sizes: list[int]) -> list[list[float]]:
    """The rates of all updates, step by step, where step p has `sizes[p]` updates an epoch."""
    batch = ready(batch_of(trajectories(4, 2)))
    one = PlannedUpdate(np.array([0]), np.ones(1))
    return [[u.lr for u in updates(batch, [one] * size, config, role, p, 0.0)] for p, size in enumerate(sizes)]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("warmup", [0, 2])
def test_the_rate_is_that_of_the_progress_whatever_the_number_of_updates(epochs: int, warmup: int) -> None:
    sizes = [1, 3, 2, 4, 1, 5]
    config = settings(max_steps=6, ppo_epochs=epochs)
    role = trained(learning_rate=0.5, lr_scheduler_type="linear", warmup_steps=warmup)
    got = rates_of_a_run(config, role, sizes)
    for p, size in enumerate(sizes):
        n = size * epochs
        x = [Fraction(p) + Fraction(k, n) for k in range(n)]
        expected = [v / warmup if v < warmup else (6 - v) / Fraction(6 - warmup) for v in x]
        np.testing.assert_allclose(got[p], [0.5 * float(v) for v in expected], rtol=1e-12, atol=1e-15)
    everything = [rate for step in got for rate in step]
    assert len(everything) == epochs * sum(sizes)
    assert [i for i, rate in enumerate(everything) if rate == 0] == (
        [0] if warmup else []
    )  # the last update still learns


def test_a_critic_has_the_rates_of_its_own_training_args() -> None:
    config = settings(max_steps=2)
    got = rates_of_a_run(
        config, trained(learning_rate=2.0, warmup_ratio=0.5, lr_scheduler_type="constant_with_warmup"), [2, 2]
    )
    assert got == [[0.0, 1.0], [2.0, 2.0]]
    assert schedule_of(trained(warmup_ratio=0.07).training_args, 100).warmup_steps == 7


# ---------------------------------------------------------------- as many as `plan` says


def lengths_of(turns: list[int]) -> list[Trajectory]:
    """Trajectories of so many turns, every one of which sampled something; (group + member) mod 3 is never 2."""
    return [played(3 * i, 0, n) for i, n in enumerate(turns)]


@examples(max_examples=40)
@given(
    data=st.data(),
    stepwise=st.booleans(),
    epochs=st.integers(1, 3),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 4),
)
def test_every_installed_policy_makes_as_many_updates_as_the_plan_says(
    data: st.DataObject, stepwise: bool, epochs: int, micro: int, accumulation: int
) -> None:
    groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    turns = data.draw(st.lists(st.integers(1, 5), min_size=groups * size, max_size=groups * size))
    batch = ready(batch_of(lengths_of(turns), row_per_turn if stepwise else one_row))
    assume(len(batch.samples) == (sum(turns) if stepwise else len(turns)))
    manager = EnvManagerConfig(num_env_groups=groups, group_size=size, tags=("T",), num_groups_partition=(groups,))
    unit = micro * accumulation
    for entry in registry().entries("batch_adjust"):
        if entry.name == "by_trajectory" and groups * size % unit:
            continue  # refused when the configuration is read
        config = settings(
            rollout_batch_size=groups * size,
            ppo_epochs=epochs,
            train_env_manager=manager,
            custom_envs={
                "T": CustomEnv("fake", max_steps=5, env_manager=Choice("stepwise" if stepwise else "trajectory"))
            },
            batch_adjust_mode=Choice(entry.name),
            actor_train=trained(per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation),
        )
        policy = registry().build("batch_adjust", entry.name, None, AdjustContext(unit, groups * size))
        planned = plan_step(batch, policy, config.seed, 1)
        made = sum(1 for _ in updates(batch, planned, config, config.actor_train, 1, 0.0))
        low, high = planning.arithmetic(config)["updates_per_step"]
        assert made == policy.updates(len(batch.samples)) * epochs
        assert low <= made <= high
        assert low == high or stepwise
