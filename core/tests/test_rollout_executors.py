"""Episodes that an executor plays somewhere else: they are the same ones, and a lost worker is one failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from attrs import evolve
from worlds import CALM, Backend, batch, plan

from turnwise.contracts.rollout import EpisodeSpec, Played, RolloutResult, RolloutSettings, WorkerLost
from turnwise.errors import TurnwiseError
from turnwise.rollout import LocalExecutor, Scheduler
from turnwise.rollout.seeds import environment_seed


class Elsewhere:
    """An executor that hands every episode to one that plays here, and remembers the attempts; `lose` of them get lost
    with their worker."""

    workers = 3

    def __init__(self, inner: LocalExecutor, lose: int = 0) -> None:
        self.inner, self.lose = inner, lose
        self.specs: list[EpisodeSpec] = []
        self.alive = self.most = self.closed = 0

    async def play(self, spec: EpisodeSpec, stop: Callable[[TurnwiseError], None]) -> Played:
        self.specs.append(spec)
        number = len(self.specs)
        self.alive += 1
        self.most = max(self.most, self.alive)
        try:
            await asyncio.sleep(0)
            if number <= self.lose:
                raise WorkerLost("worker 0 died", counts=number == 1)
            return await self.inner.play(spec, stop)
        finally:
            self.alive -= 1

    def moved(self) -> int:
        return self.inner.moved()

    def waits(self) -> list[str]:
        return self.inner.waits()

    def listen(self, changed: Callable[[], None]) -> None:
        self.inner.listen(changed)

    async def hold(self) -> None:
        await self.inner.hold()

    def flying(self) -> int:
        return self.inner.flying()

    async def freeze(self) -> None:
        await self.inner.freeze()

    async def release(self) -> None:
        await self.inner.release()

    async def records(self) -> None:
        await self.inner.records()

    def stranded(self) -> bool:
        return self.inner.stranded()

    async def abort(self) -> None:
        await self.inner.abort()

    async def close(self) -> None:
        self.closed += 1
        await self.inner.close()


def elsewhere(settings: RolloutSettings, lose: int = 0, groups: int = 2) -> tuple[RolloutResult, Elsewhere]:
    async def run() -> tuple[RolloutResult, Elsewhere]:
        plans, backend = [plan([], groups=groups)], Backend()
        executor = Elsewhere(LocalExecutor(plans, settings, backend, None), lose)  # type: ignore[arg-type]
        scheduler = Scheduler(plans, settings, backend, None, executor)  # type: ignore[arg-type]
        try:
            return await scheduler.next_batch(0, version=0), executor
        finally:
            await scheduler.close()

    return asyncio.run(run())


def test_episodes_played_on_another_stage_are_the_same_ones() -> None:
    there, executor = elsewhere(CALM)
    here = batch([plan([])])
    assert [(t.group, t.member, t.seed) for t in there.trajectories] == [
        (t.group, t.member, t.seed) for t in here.trajectories
    ]
    assert there.counts == here.counts
    assert {(s.tag, s.group, s.member, s.attempt) for s in executor.specs} == {
        ("Lake", g, m, 0) for g in (0, 1) for m in (0, 1)
    }
    assert {s.seed for s in executor.specs} == {environment_seed(CALM.seed, "Lake", g) for g in (0, 1)}
    assert executor.closed == 1


def test_max_concurrent_is_that_of_one_worker() -> None:
    _, executor = elsewhere(evolve(CALM, max_concurrent=1), groups=5)
    assert executor.most == 3


def test_a_lost_worker_is_one_failure_however_many_episodes_it_played() -> None:
    result, executor = elsewhere(evolve(CALM, max_env_failure_rate=0.3), lose=3)
    assert result.counts["env_failures"] == 1
    assert result.counts["retries"] == 3
    assert result.counts["episodes"] == 4
    assert len(result.failures) == 3
    assert sorted(s.attempt for s in executor.specs) == [0, 0, 0, 0, 1, 1, 1]
