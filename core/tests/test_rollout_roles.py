"""Episodes that give several trajectories, and those in which a further model plays: from the executor to batch,
metrics and configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.config.loader import load
from turnwise.contracts.env_manager import Episode, Limits, Sampler
from turnwise.contracts.player import Player, chosen
from turnwise.contracts.rollout import RolloutResult, RolloutSettings, TagPlan
from turnwise.data.batch import build_batch
from turnwise.data.exact import decode, encode
from turnwise.data.normalise import RewardNormalization, normalise_scores
from turnwise.data.record import trajectory_record
from turnwise.data.trajectory import Sample, Trajectory, Turn, int32
from turnwise.errors import PluginError
from turnwise.pipeline import metrics
from turnwise.planning import assembly
from turnwise.planning.preflight import preflight
from turnwise.rollout import Scheduler
from turnwise.testing.fakes import FakeEnvironment

SETTINGS = RolloutSettings(seed=0)


class Says(Player):
    """A player that says one word, and notes what it was asked and that it was closed."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.asked: list[tuple[int, ...]] = []
        self.closed = 0

    async def generate(self, request: Any) -> Any:
        self.asked.append(request.order)
        return chosen(self.word)

    async def close(self) -> None:
        self.closed += 1


def turn(reward: float) -> Turn:
    return Turn(int32([1]), int32([2]), np.ones(1, np.bool_), np.zeros(1, np.float32), int32([0]), reward, None)


def trajectory(group: int, member: int, role: str, reward: float) -> Trajectory:
    return Trajectory("T", group, member, 1, (turn(reward),), "terminated", reward > 0, role=role)


class TwoRoles:
    """Each role asks its own model once; the second loses what the first wins."""

    def __init__(self, returned: Callable[[list[Trajectory]], Any] = lambda played: played) -> None:
        self.returned = returned

    async def run(self, episode: Episode, sampler: Sampler) -> Any:
        await episode.environment.reset()
        first = await sampler.generate(turn=0, messages=[{"role": "user", "content": "?"}], max_new_tokens=1)
        second = await episode.samplers["other"].generate(
            turn=1, messages=[{"role": "user", "content": "?"}], max_new_tokens=1
        )
        won = float(first.text == "yes") + episode.member
        played = [
            trajectory(episode.group, episode.member, role, score) for role, score in (("first", won), ("second", -won))
        ]
        assert second.text == "no"
        return self.returned(played)

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        return [Sample(int32([1, 2]), np.array([False, True]), int32([-1, 0]), np.zeros(2, np.float32), int32([-1, 0]))]


def rolled_out(manager: Any, other: Says, settings: RolloutSettings = SETTINGS) -> RolloutResult:
    async def play() -> RolloutResult:
        limits = Limits(8, 1, 1, 1)
        plan = TagPlan(
            "T",
            FakeEnvironment,
            manager,
            limits,
            groups=2,
            group_size=2,
            step="inline",
            samplers={"other": lambda: other},
        )
        scheduler = Scheduler([plan], settings, Says("yes"), None)
        try:
            return await scheduler.next_batch(0, version=0)
        finally:
            await scheduler.close()

    return asyncio.run(play())


def test_every_role_of_an_episode_is_a_trajectory_with_rows_of_its_own() -> None:
    other = Says("no")
    played = rolled_out(TwoRoles(), other)
    assert [(t.group, t.member, t.role) for t in played.trajectories] == [
        (g, m, r) for g in (0, 1) for m in (0, 1) for r in ("first", "second")
    ]
    assert [len(rows) for rows in played.samples] == [1] * 8
    assert (played.counts["episodes"], played.counts["turns"]) == (4, 8)
    assert len(other.asked) == 4
    assert all(order[-1] == 1 for order in other.asked)
    assert other.closed == 1


def test_a_role_is_compared_with_the_same_role_of_its_group() -> None:
    played = rolled_out(TwoRoles(), Says("no"))
    batch = build_batch(played.trajectories, played.samples)
    table = batch.trajectories
    assert table["group"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert table["traj_group_id"].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert table["role"].tolist() == ["first", "second"] * 4
    centred = normalise_scores(batch, RewardNormalization("traj_group_id", "mean"))
    np.testing.assert_allclose(centred, [-0.5, 0.5, 0.5, -0.5] * 2)
    got = metrics.batch_metrics(batch)
    assert (got["rollout/success"], got["group/all_correct_ratio"], got["group/all_wrong_ratio"]) == (0.5, 0.5, 0.5)
    by_tag = metrics.environment_metrics(played.trajectories)
    assert (by_tag["env/T/first/score/mean"], by_tag["env/T/second/score/mean"], by_tag["env/T/second/success"]) == (
        1.5,
        -1.5,
        0.0,
    )
    assert metrics.evaluation_metrics(played.trajectories, {"T": 5})["val/T/failed"] == pytest.approx(
        0.2
    )  # one of five episodes


def test_without_roles_groups_are_what_they_were() -> None:
    played = [trajectory(g, m, "", 1.0) for g in (7, 9) for m in (0, 1)]
    table = build_batch(played, [[] for _ in played]).trajectories
    assert table["traj_group_id"].tolist() == table["group"].tolist() == [7, 7, 9, 9]
    assert "role" not in trajectory_record(0, played[0])


def test_a_role_is_written_and_read() -> None:
    one = trajectory(0, 0, "first", 1.0)
    assert decode(*encode(one)).role == "first"
    assert trajectory_record(0, one)["role"] == "first"


@pytest.mark.parametrize(
    "returned", [lambda played: [], lambda played: None, lambda played: [played[0], played[0]], lambda played: ["x"]]
)
def test_what_is_no_list_of_roles_ends_the_run_with_its_manager_named(returned: Callable[..., Any]) -> None:
    with pytest.raises(PluginError, match=r"the environment manager of T returned .*Fix:"):
        rolled_out(TwoRoles(returned), Says("no"))


def test_further_models_are_named_in_the_configuration(toy: Callable[..., Path]) -> None:
    path = toy()
    tag, env = "Toy", {"env_type": "fake", "env_manager": "fake", "max_steps": 3, "step": "inline"}
    config = load(toy(custom_envs={tag: {**env, "samplers": {"other": "first"}}})).config
    (plan,) = assembly.tag_plans(config, config.train_env_manager, config.actor_infer.generating_args, path.parent)
    assert list(plan.samplers) == ["other"]
    assert plan.samplers["other"]().input == "messages"
    assert preflight(config, path.parent).config == []
    refused = load(toy(custom_envs={tag: {**env, "samplers": {"other": "fake"}}})).config
    lines = preflight(refused, path.parent).config
    assert lines == [
        f"$.custom_envs.{tag}.samplers.other: 'fake_backend' needs a model of its own, which a run does not place. "
        "Fix: name a player, such as openai or random."
    ]
