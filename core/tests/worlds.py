"""A world, a manager and a backend that tests of the scheduler script, and batches played with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from turnwise.contracts.env_manager import Episode, Limits, Sampler
from turnwise.contracts.inference import Request
from turnwise.contracts.rollout import RolloutResult, RolloutSettings, TagPlan
from turnwise.data import Generation, Sample, Trajectory, Turn
from turnwise.rollout import Scheduler

TURNS = 3
LIMITS = Limits(sequence_length=64, max_new_tokens=4, max_tokens_per_step=4, max_turns=TURNS)
CALM = RolloutSettings(seed=11, step_timeout=5, reset_timeout=5, request_timeout=5, max_env_failure_rate=0.99)


class World:
    """Tells its resets to `log`; `behave(world, what)` may raise, sleep, or return a result of its own."""

    def __init__(self, log: list[Any], behave: Callable[[World, str], Any]) -> None:
        self.log, self.behave, self.seed = log, behave, 0
        log.append(("built", id(self)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.seed = seed or 0
        self.log.append(("reset", seed, options))
        return self.behave(self, "reset") or ("start", {})

    def step(self, action: str) -> Any:
        return self.behave(self, "step") or (f"after {action}", 1.0, False, False, {})

    def render(self) -> str:
        return f"frame of {self.seed}"

    def close(self) -> None:
        self.log.append(("closed", id(self)))


class Manager:
    """Plays TURNS turns; a prompt is the turn's number."""

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        await episode.environment.reset()
        turns = []
        for k in range(episode.limits.max_turns):
            ids = np.array([k], np.int32)
            answer = await sampler.generate(turn=k, ids=ids, max_new_tokens=4, actions=("go",))
            assert answer.ids is not None
            _, reward, *_ = await episode.environment.step(answer.text)
            mask, versions = np.ones(len(answer.ids), bool), np.zeros(len(answer.ids), np.int32)
            turns.append(Turn(ids, answer.ids, mask, None, versions, reward, anchor=k))
        return Trajectory(
            episode.tag, episode.group, episode.member, episode.seed, tuple(turns), "turns", attempt=episode.attempt
        )

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        n = len(trajectory.turns)
        return [
            Sample(np.zeros(n, np.int32), np.zeros(n, bool), np.full(n, -1, np.int32), None, np.full(n, -1, np.int32))
        ]


class Backend:
    """Answers with the request's seed as text; remembers requests and live counts in the order in which they came."""

    input = "ids"

    def __init__(self, answer: Callable[[Request], Any] | None = None) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.events: list[Any] = []
        self.aborted: list[Request] = []

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        self.events.append("generate")
        await asyncio.sleep(0)
        if self.answer is not None:
            await self.answer(request)
        return Generation(str(request.seed), np.array([1, 2], np.int32), None, None, "stop")

    def live(self, episodes: int) -> None:
        self.events.append(episodes)

    async def abort(self, request: Request) -> None:
        self.aborted.append(request)


def well(world: World, what: str) -> None:
    return None


def plan(log: list[Any], behave: Callable[[World, str], Any] = well, **options: Any) -> TagPlan:
    merged: dict[str, Any] = {"tag": "Lake", "groups": 2, "group_size": 2, "step": "inline"} | options
    return TagPlan(build=lambda: World(log, behave), manager=Manager(), limits=LIMITS, **merged)


def schedule(plans: list[TagPlan], settings: RolloutSettings, backend: Any) -> Scheduler:
    return Scheduler(plans, settings, backend, None)


def batch(
    plans: list[TagPlan], settings: RolloutSettings = CALM, backend: Any = None, step: int = 0, render: int = 0
) -> RolloutResult:
    async def run() -> RolloutResult:
        scheduler = schedule(plans, settings, backend or Backend())
        try:
            return await (
                scheduler.evaluate(render=render) if settings.evaluation else scheduler.next_batch(step, version=step)
            )
        finally:
            await scheduler.close()
            await scheduler.close()
            await asyncio.sleep(0.01)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return asyncio.run(run())


def places(result: RolloutResult) -> list[tuple[int, int]]:
    return [(t.group, t.member) for t in result.trajectories]


def fails_first(times: int, what: str, fault: Callable[[], Any]) -> Callable[[World, str], Any]:
    """Fail in the first `times` calls of `what`, over all instances."""
    calls: list[str] = []

    def behave(world: World, called: str) -> Any:
        calls.append(called)
        return fault() if called == what and calls.count(what) <= times else None

    return behave


def throw() -> None:
    raise ValueError("boom")
