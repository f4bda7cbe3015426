"""Environments in workers: the same episodes as in the driver, and workers that die."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

pytest.importorskip("ray", reason="ray is not installed")

from turnwise.contracts.rollout import EpisodeSpec, RolloutResult, RolloutSettings, TagPlan, WorkerLost
from turnwise.errors import EngineError, EnvironmentFailure
from turnwise.rollout import Scheduler
from turnwise.testing.fake_model import FakeChat
from turnwise_ray.actors import result

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("cluster"), pytest.mark.filterwarnings("ignore")]

SETTINGS = RolloutSettings(seed=3, step_timeout=10, reset_timeout=10, request_timeout=60, max_env_failure_rate=0.9)


async def batch(executor: Any, plans: list[TagPlan], settings: RolloutSettings, backend: Any) -> RolloutResult:
    scheduler = Scheduler(plans, settings, backend, FakeChat(), executor)
    try:
        return await (scheduler.evaluate(render=2) if settings.evaluation else scheduler.next_batch(0, version=0))
    finally:
        await scheduler.close()


def same(one: RolloutResult, other: RolloutResult) -> None:
    assert len(one.trajectories) == len(other.trajectories)
    for mine, theirs in zip(one.trajectories, other.trajectories, strict=True):
        assert (mine.group, mine.member, mine.attempt, mine.seed, mine.score) == (
            theirs.group,
            theirs.member,
            theirs.attempt,
            theirs.seed,
            theirs.score,
        )
        for a, b in zip(mine.turns, theirs.turns, strict=True):
            np.testing.assert_array_equal(a.response_ids, b.response_ids)
            assert a.observation == b.observation
    for rows, others in zip(one.samples, other.samples, strict=True):
        for a, b in zip(rows, others, strict=True):
            np.testing.assert_array_equal(a.input_ids, b.input_ids)
    assert one.counts == other.counts
    assert sorted(one.failures) == sorted(other.failures)
    assert one.frames.keys() == other.frames.keys()


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        pytest.param(SETTINGS, {}, marks=pytest.mark.matrix),
        (evolve(SETTINGS, evaluation=True, max_concurrent=2), {}),
        (SETTINGS, {"fails": "raise", "fails_every": 3}),
        pytest.param(SETTINGS, {"fails": "nan", "fails_every": 3}, marks=pytest.mark.matrix),
    ],
)
def test_workers_play_the_same_episodes_as_the_driver(
    place: Any, settings: RolloutSettings, options: Any, plan: Any, prepared: Any
) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime)
        plans = [plan(**options)]
        executor = runtime.executor(plans, settings, FakeChat(), backend)
        assert executor.workers == 2
        there = await batch(executor, plans, settings, backend)
        here = await batch(None, plans, settings, backend)
        same(there, here)
        assert there.counts["episodes"] > 0

    place(work, env_workers=2)


def test_without_workers_or_for_players_of_the_driver_the_driver_plays(place: Any, plan: Any, prepared: Any) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime)
        assert runtime.executor([plan()], SETTINGS, FakeChat(), backend) is None

    place(work)


def test_a_lost_worker_is_one_failure_and_its_episodes_are_played_elsewhere(
    place: Any, tmp_path: Path, plan: Any, prepared: Any
) -> None:
    (tmp_path / "MORTAL_ENVIRONMENT").write_text(str(tmp_path / "died"))

    async def work(runtime: Any) -> None:
        backend = await prepared(runtime)
        plans, strict = [plan("mortal_env")], evolve(SETTINGS, max_env_failure_rate=0.1)
        played = await batch(runtime.executor(plans, strict, FakeChat(), backend), plans, strict, backend)
        assert (tmp_path / "died").exists()
        assert played.counts["env_failures"] == 1
        assert played.counts["episodes"] == 12
        assert 1 <= played.counts["retries"] <= 6
        assert len(played.failures) == played.counts["retries"]
        assert all("env_worker." in line and " died: " in line for line in played.failures)
        assert [worker.restarts for worker in runtime.workers.all].count(1) == 1
        again = await batch(runtime.executor(plans, strict, FakeChat(), backend), plans, strict, backend)
        assert again.counts["env_failures"] == 0

    place(work, env_workers=2)


def test_a_worker_that_answers_no_more_is_replaced_and_its_episodes_are_played_elsewhere(
    place: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    plan: Any,
    prepared: Any,
) -> None:
    monkeypatch.setattr("turnwise_ray.environments.WATCH_SECONDS", 0.5)
    (tmp_path / "STOPPED_ENVIRONMENT").write_text(str(tmp_path / "stopped"))

    async def work(runtime: Any) -> None:
        backend = await prepared(runtime)
        plans = [plan("mortal_env")]
        executor = runtime.executor(plans, SETTINGS, FakeChat(), backend)
        played = await asyncio.wait_for(batch(executor, plans, SETTINGS, backend), 60)
        assert (tmp_path / "stopped").exists()
        assert (played.counts["env_failures"], played.counts["episodes"]) == (1, 12)
        assert played.failures and all(
            "answered nothing for env_worker_timeout = 4 s" in line for line in played.failures
        )

    place(work, env_workers=2, env_worker_timeout=4)
    message = next(r.getMessage() for r in caplog.records if "is started again" in r.getMessage())
    assert message.startswith("env_worker.") and " died: it answered nothing for env_worker_timeout = 4 s" in message


def test_a_worker_past_max_restarts_is_not_started_for_an_episode_that_waited_for_it(
    place: Any, plan: Any, prepared: Any
) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime)
        executor = runtime.executor([plan()], SETTINGS, FakeChat(), backend)
        worker = runtime.workers.all[0]
        async with worker.starting:
            waiting = asyncio.ensure_future(executor.play(EpisodeSpec("Count", 0, 0, 0, seed=1), lambda error: None))
            await asyncio.sleep(0)
            worker.gone = True
        with pytest.raises(WorkerLost, match=r"env_worker\.0 died more than max_restarts"):
            await asyncio.wait_for(waiting, 30)
        assert worker.actor is None

    place(work, env_workers=1)


def test_a_worker_that_comes_up_when_no_engine_ever_will_ends_its_episodes_with_the_cause(
    place: Any, plan: Any, prepared: Any
) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime)
        executor = runtime.executor([plan()], SETTINGS, FakeChat(), backend)
        runtime.workers.serve({}, "all engines are gone")
        with pytest.raises(EngineError, match="all engines are gone"):
            await asyncio.wait_for(executor.play(EpisodeSpec("Count", 0, 0, 0, seed=1), lambda error: None), 30)

    place(work, env_workers=1)


def test_with_more_episodes_than_rays_own_limit_worker_and_engine_still_answer_everything_else(
    place: Any, trainer: Any, sampler: Any, plan: Any
) -> None:
    async def work(runtime: Any) -> None:
        role, backend = await runtime.train(trainer()), await runtime.serve(sampler(delay=600.0))
        offer = await role.offer("fake", 1, backend.receivers("fake"))
        await asyncio.gather(role.send(offer), backend.receive(offer))
        executor = runtime.executor([plan()], SETTINGS, FakeChat(), backend)
        specs = [EpisodeSpec("Count", group, member, 0, seed=group) for group in range(110) for member in range(10)]
        tasks = [asyncio.ensure_future(executor.play(spec, lambda error: None)) for spec in specs]
        worker = runtime.workers.all[0]
        while worker.load < len(specs) or not worker.open:
            await asyncio.sleep(0.05)
        while await asyncio.wait_for(result(worker.actor.flying.remote(0, -1)), 20) < len(specs):
            await asyncio.sleep(0.05)
        try:
            await asyncio.wait_for(result(worker.actor.node.remote()), 20)
            await asyncio.wait_for(backend.pause(), 20)
        finally:
            for task in tasks:
                task.cancel()

    place(work, env_workers=1)


def test_failures_past_the_rate_end_the_batch_with_the_environments_words(place: Any, plan: Any, prepared: Any) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime)
        plans = [plan(fails="raise")]
        executor = runtime.executor(plans, SETTINGS, FakeChat(), backend)
        with pytest.raises(
            EnvironmentFailure, match=r"Count\.step raised RuntimeError: the fake environment raises at turn 1"
        ):
            await batch(executor, plans, evolve(SETTINGS, max_env_failure_rate=0.2), backend)

    place(work, env_workers=1)
