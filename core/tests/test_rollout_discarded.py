"""Tokens that were sampled and train nowhere: of failed attempts, of replaced groups, of episodes begun anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from turnwise.contracts.env_manager import Episode, Limits, ManagerContext, Sampler
from turnwise.contracts.inference import Request
from turnwise.contracts.rollout import RolloutResult, RolloutSettings, TagPlan
from turnwise.data import Generation, Trajectory
from turnwise.pipeline.metrics import rollout_metrics
from turnwise.rollout import Scheduler
from turnwise.rollout.seeds import environment_seed
from turnwise.testing.fakes import FakeChat, FakeEnvironment, FakeEnvManager
from turnwise.testing.ticks import run_in_ticks

LIMITS = Limits(sequence_length=64, max_new_tokens=4, max_tokens_per_step=4, max_turns=3)
CALM = RolloutSettings(seed=11, max_env_failure_rate=0.99)
EACH = 2
"""Tokens of every response; an episode has three."""


class Backend:
    """Answers everything with two tokens."""

    input = "ids"

    async def generate(self, request: Request) -> Generation:
        await asyncio.sleep(1)
        return Generation("ab", np.array([97, 98], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")

    def live(self, episodes: int) -> None:
        pass

    async def abort(self, request: Request) -> None:
        pass


class Fails(FakeEnvironment):
    """Raises in step `at` of the first `times` episodes that reset with the seed of group `group`."""

    def __init__(self, left: dict[int, int], at: int = 2) -> None:
        super().__init__(fails="raise", fails_at=at, fails_every=2**40)
        self.left = left

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        returned = super().reset(seed=seed, options=options)
        if self.left.get(seed or 0, 0):
            self.left[seed or 0] -= 1
            self._seed = 0  # a multiple of any number: the step will raise
        return returned


def plan(build: Callable[[], Any] = FakeEnvironment, manager: Any = None) -> TagPlan:
    manager = manager or FakeEnvManager(None, ManagerContext(tag="Count", max_turns=3))
    return TagPlan("Count", build, manager, LIMITS, groups=2, group_size=2, step="inline")


def batch(one: TagPlan, **options: Any) -> RolloutResult:
    async def run() -> RolloutResult:
        scheduler = Scheduler([one], evolve(CALM, **options), Backend(), FakeChat())  # type: ignore[arg-type]
        try:
            return await scheduler.next_batch(0, version=0)
        finally:
            await scheduler.close()

    return run_in_ticks(run())


def failing(group: int, times: int) -> Callable[[], Any]:
    left = {environment_seed(CALM.seed, "Count", group): times}
    return lambda: Fails(left)


@pytest.mark.parametrize("cuts", [{}, {"async_generation_ratio": 1, "weight_update": "between_turns", "max_steps": 1}])
def test_nothing_is_discarded_unless_an_attempt_fails(cuts: dict[str, Any]) -> None:
    assert batch(plan(), **cuts).counts["discarded_tokens"] == 0
    result = batch(plan(failing(0, times=1)), **cuts)
    assert result.counts["env_failures"] == 1
    assert result.counts["discarded_tokens"] == 2 * EACH  # of the two turns before the failure
    assert result.counts["sampled_tokens"] == 4 * 3 * EACH


def test_an_attempt_that_its_manager_ends_is_discarded_whole() -> None:
    class Clumsy(FakeEnvManager):
        left = 1

        async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
            played = await super().run(episode, sampler)
            if Clumsy.left:
                Clumsy.left -= 1
                raise KeyError("role")
            return played

    result = batch(plan(manager=Clumsy(None, ManagerContext(tag="Count", max_turns=3))))
    assert result.counts["discarded_tokens"] == 3 * EACH
    assert "the environment manager raised KeyError: 'role', at " in result.failures[0]


def test_episodes_of_a_replaced_group_are_discarded() -> None:
    result = batch(plan(failing(1, times=1)), max_env_retries=0)
    assert (result.counts["replaced_groups"], result.counts["discarded_episodes"]) == (1, 1)
    assert result.counts["discarded_tokens"] == (2 + 3) * EACH  # the one that failed, and the whole one beside it


def test_the_metric_is_there_where_something_is_played_ahead() -> None:
    counts = {"episodes": 4.0, "discarded_tokens": 7.0}
    assert rollout_metrics(counts, ahead=False) == {"rollout/episodes": 4.0}
    assert rollout_metrics(counts, ahead=True) == {"rollout/episodes": 4.0, "async/discarded_tokens": 7.0}
    assert rollout_metrics({}, ahead=True) == {"async/discarded_tokens": 0.0}  # written by an older version
