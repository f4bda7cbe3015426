"""Steps that are started ahead: how far, in which order, what the backend knows of them, and what their failure ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from attrs import evolve
from worlds import CALM, Backend, fails_first, places, plan, schedule, throw

from turnwise.contracts.inference import Request
from turnwise.errors import CheckpointError, EngineError
from turnwise.rollout.seeds import REPLACEMENT, environment_seed
from turnwise.testing.ticks import run_in_ticks


def test_asynchronous_steps_are_started_ahead_as_far_as_the_version_allows() -> None:
    backend = Backend()

    async def run() -> None:
        scheduler = schedule([plan([])], evolve(CALM, async_generation_ratio=1), backend)
        assert places(await scheduler.next_batch(0, version=0)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        await asyncio.sleep(0.05)
        assert {r.order[1] for r in backend.requests} == {0, 1, 2, 3}  # step 1 went on playing, step 2 did not start
        assert places(await scheduler.next_batch(1, version=1)) == [(2, 0), (2, 1), (3, 0), (3, 1)]
        await scheduler.close()

    run_in_ticks(run())


def test_the_state_between_synchronous_batches_is_an_empty_queue() -> None:
    scheduler = schedule([plan([])], CALM, Backend())
    assert scheduler.state() == {"queue": []}
    scheduler.load_state(scheduler.state())
    for state in ({"queue": [1]}, {"queue": None}, {}):
        with pytest.raises(CheckpointError, match="queue of groups"):
            scheduler.load_state(state)


def test_nothing_past_max_steps_is_started() -> None:
    backend = Backend()

    async def run() -> None:
        scheduler = schedule([plan([])], evolve(CALM, async_generation_ratio=2, max_steps=2), backend)
        for step in range(2):
            await scheduler.next_batch(step, version=step)
            await asyncio.sleep(0.05)
        await scheduler.close()

    run_in_ticks(run())
    assert {r.order[1] for r in backend.requests} == {0, 1, 2, 3}


def test_a_replacement_is_played_before_what_belongs_to_later_steps() -> None:
    log: list[Any] = []
    settings = evolve(CALM, async_generation_ratio=1, max_concurrent=1, max_env_retries=0)

    async def run() -> None:
        scheduler = schedule([plan(log, fails_first(2, "reset", throw))], settings, Backend())
        await scheduler.next_batch(0, version=0)
        await scheduler.next_batch(1, version=0)
        await scheduler.close()

    run_in_ticks(run())
    seeds = [entry[1] for entry in log if entry[0] == "reset"]
    assert seeds == [
        environment_seed(11, "Lake", group) for group in (0, 0, REPLACEMENT, REPLACEMENT, 1, 1, 2, 2, 3, 3)
    ]


def test_two_schedulers_of_a_backend_report_one_sum() -> None:
    """Training that plays ahead, and an evaluation meanwhile."""
    backend = Backend()
    freed = asyncio.Event()

    async def answer(request: Request) -> None:
        if request.order[:2] in ((0, 2), (0, 3)):  # the groups of step 1
            await freed.wait()

    backend.answer = answer

    async def run() -> None:
        training = schedule([plan([])], evolve(CALM, async_generation_ratio=1), backend)
        evaluation = schedule([plan([], groups=3, group_size=1)], evolve(CALM, evaluation=True), backend)
        await training.next_batch(0, version=0)
        before = len(backend.events)
        await evaluation.evaluate()
        assert [event for event in backend.events[before:] if event != "generate"] == [7, 6, 5, 4]
        freed.set()
        await training.next_batch(1, version=0)
        assert backend.events[-1] == 0
        await evaluation.evaluate()
        await training.close()
        await evaluation.close()

    run_in_ticks(run())
    assert [event for event in backend.events if event != "generate"][-4:] == [3, 2, 1, 0]


def test_a_failure_of_what_plays_ahead_lowers_the_number_alive_and_ends_the_next_batch() -> None:
    backend = Backend()

    async def answer(request: Request) -> None:
        if request.order == (0, 2, 0, 0, 0):
            await asyncio.sleep(0.05)
            raise EngineError("lost")
        if request.order[1] in (2, 3):
            await asyncio.sleep(60)

    backend.answer = answer

    async def run() -> None:
        scheduler = schedule([plan([])], evolve(CALM, async_generation_ratio=1), backend)
        await scheduler.next_batch(0, version=0)
        await asyncio.sleep(0.2)
        assert backend.events[-1] == 3
        with pytest.raises(EngineError, match="lost"):
            await scheduler.next_batch(1, version=1)
        assert backend.events[-1] == 0
        assert not any(request.order[1] > 3 for request in backend.requests)
        await scheduler.close()

    run_in_ticks(run())
