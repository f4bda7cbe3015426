"""From episodes to updates: what the roles are asked and in which order, what travels from step to step, and where
numpy works."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from turnwise.config import load
from turnwise.config.schema import RunConfig
from turnwise.contracts.estimator import EstimatorContext
from turnwise.contracts.rollout import RolloutResult
from turnwise.data.batch import Batch
from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.data.trajectory import Trajectory
from turnwise.errors import TrainerError
from turnwise.pipeline.clock import Clock
from turnwise.pipeline.colocation import Colocation
from turnwise.pipeline.learner import Learner
from turnwise.pipeline.metrics import Reporting
from turnwise.pipeline.roles import Roles
from turnwise.testing.fakes import FakeEstimator
from turnwise.testing.synthetic import one_row, trajectories

Toy = Callable[..., Path]


class Asked:
    """A training role that notes what it is asked: log-probs −1, values 0.25, a loss of 2."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen
        self.updates: list[Update] = []

    async def logprobs(self, rows: Rows) -> np.ndarray:
        self.seen.append(f"{self.name}.logprobs")
        return np.full(int(rows.response_mask.sum()), -1.0, np.float32)

    async def values(self, rows: Rows) -> np.ndarray:
        self.seen.append(f"{self.name}.values")
        return np.full(int(rows.response_mask.sum()), 0.25, np.float32)

    async def update(self, update: Update) -> UpdateResult:
        self.seen.append(f"{self.name}.update")
        self.updates.append(update)
        return UpdateResult(2.0, 0.5)


class Watched(FakeEstimator):
    """Notes the thread that it works on, and the batch."""

    def __init__(self) -> None:
        super().__init__(None, EstimatorContext(seed=1))
        self.threads: list[str] = []
        self.batch: Batch | None = None

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        self.threads.append(threading.current_thread().name)
        self.batch = batch
        return super().compute(batch)


class Room:
    """A learner between noted roles."""

    def __init__(self, toy: Toy, *, reference: bool = False, critic: bool = False, **changes: Any) -> None:
        config: RunConfig = load(toy(**changes)).config
        config = evolve(config, critic=config.actor_train)
        self.seen: list[str] = []
        self.actor = Asked("actor_train", self.seen)
        self.reference = Asked("reference", self.seen) if reference else None
        self.critic = Asked("critic", self.seen) if critic else None
        self.estimator, self.clock, self.reporting = Watched(), Clock(), Reporting()
        backend: Any = None
        training: Any = {"actor_train": self.actor}
        roles: Any = Roles(
            backend,
            self.actor,
            backend,
            self.reference,
            reference,
            self.critic,
            "fake",
            Colocation(config, training, backend),
        )  # type: ignore[arg-type]
        self.learner = Learner(config, roles, self.estimator, self.clock, config.init_kl_coef, self.reporting)

    def step(self, number: int, played: list[Trajectory]) -> dict[str, float]:
        """Learn from these; all metrics."""

        async def whole() -> dict[str, float]:
            lesson = await self.learner.prepare(number, result(played))
            return lesson.metrics | (await self.learner.learn(lesson)).metrics

        return asyncio.run(whole())


def result(played: list[Trajectory]) -> RolloutResult:
    return RolloutResult(played, [one_row(one) if one.turns else [] for one in played], {"attempts": 13.0}, {}, [])


def test_a_plain_step_asks_for_old_log_probs_once_and_updates(toy: Toy) -> None:
    room = Room(toy, recompute_old_logprobs="true")
    out = room.step(0, trajectories())
    assert room.seen[0] == "actor_train.logprobs"
    assert set(room.seen[1:]) == {"actor_train.update"}
    assert (out["policy/loss"], out["policy/updates"], out["rollout/attempts"]) == (2.0, len(room.actor.updates), 13.0)
    assert out["policy/learning_rate"] == room.actor.updates[-1].lr
    assert {"old_logprobs", "advantage", "actor_train"} == room.clock.take().keys()


def test_reference_and_critic_come_before_the_advantages_and_the_critic_learns_first(toy: Toy) -> None:
    room = Room(toy, reference=True, critic=True, recompute_old_logprobs="true")
    room.step(0, trajectories())
    assert list(dict.fromkeys(room.seen)) == [
        "actor_train.logprobs", "reference.logprobs", "critic.values", "critic.update", "actor_train.update",
    ]  # fmt: skip
    batch = room.estimator.batch
    assert batch is not None
    mask = batch.tokens["response_mask"]
    assert set(batch.tokens["ref_log_probs"][mask]) == {-1.0}
    assert set(batch.tokens["values"][mask]) == {0.25}
    assert set(batch.tokens["values"][~mask]) == {0.0}


def test_numpy_leaves_the_event_loop_free(toy: Toy) -> None:
    room = Room(toy)
    room.step(0, trajectories())
    assert room.estimator.threads
    assert threading.main_thread().name not in room.estimator.threads


def test_epochs_repeat_the_updates(toy: Toy) -> None:
    once, twice = Room(toy), Room(toy, ppo_epochs=2)
    once.step(0, trajectories())
    twice.step(0, trajectories())
    assert len(twice.actor.updates) == 2 * len(once.actor.updates)


def test_rewards_are_clipped_for_training_and_stay_what_they_were_for_everybody_else(toy: Toy) -> None:
    room, played = Room(toy, reward_clip=0.1), trajectories()
    before = [one.score for one in played]
    room.step(0, played)
    assert room.estimator.batch is not None
    assert np.abs(room.estimator.batch.turns["reward"]).max() <= 0.1
    assert [one.score for one in played] == before


def test_the_kl_coefficient_adapts_once_a_step_and_is_there_for_the_checkpoint(toy: Toy) -> None:
    room = Room(toy, reference=True, init_kl_coef=0.1, target_kl=0.5, kl_horizon=100, recompute_old_logprobs="true")
    first = room.step(0, trajectories())
    assert first["critic/kl_coef"] == 0.1
    assert first["critic/kl"] == 0.0  # both answer −1
    expected = 0.1 * (
        1 - 0.2 * sum(any(turn.response_mask.any() for turn in one.turns) for one in trajectories()) / 100
    )
    assert room.learner.kl_coef == pytest.approx(expected)
    used = room.learner.kl_coef
    assert room.step(1, trajectories())["critic/kl_coef"] == used


def test_filtered_groups_are_counted_and_not_learnt(toy: Toy) -> None:
    room = Room(toy, group_filters=[{"use": "fake", "drop_even": True}])
    out = room.step(0, trajectories(4, 3))
    assert out["rollout/filtered"] == 6.0
    rows = sum(len(update.rows) for update in room.actor.updates)
    assert rows < 11  # of eleven trajectories with a row


def test_a_step_without_a_sampled_token_is_reported_and_learns_nothing(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room(toy)
    out = room.step(3, [evolve(one, turns=()) for one in trajectories(1, 2)])
    assert [len(update.rows) for update in room.actor.updates if len(update.rows)] == []
    assert out["rollout/samples"] == 0.0
    assert "step 3: no token was sampled in 2 episodes" in caplog.text


def test_once_a_tag_has_reported_success_an_episode_without_a_report_had_none(toy: Toy) -> None:
    room = Room(toy)
    silent = [evolve(one, success=None) for one in trajectories(2, 2)]
    assert "rollout/success" not in room.step(0, silent)
    assert room.step(1, [evolve(silent[0], success=True), *silent[1:]])["rollout/success"] == 0.25
    assert room.step(2, silent)["rollout/success"] == 0.0
    assert room.reporting.to_plain() == ["synthetic"]


def test_updates_that_made_no_step_are_counted_from_step_to_step_and_end_the_run(toy: Toy) -> None:
    sound = Room(toy)
    sound.step(0, trajectories())
    count = len(sound.actor.updates)
    room = Room(toy, max_skipped_updates=count)

    async def broken(update: Update) -> UpdateResult:
        return UpdateResult(float("nan"), float("nan"), skipped=True)

    room.actor.update = broken  # type: ignore[method-assign]
    assert room.step(0, trajectories())["policy/skipped_updates"] == count > 0
    with pytest.raises(TrainerError, match="in a row made no step"):
        room.step(1, trajectories())
