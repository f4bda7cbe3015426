"""What ends a batch: errors of the backend, requests without an answer, tasks that end by no exception, a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from worlds import CALM, Backend, Manager, batch, plan, schedule

from turnwise.contracts.env_manager import Episode, Sampler
from turnwise.contracts.inference import Request
from turnwise.contracts.rollout import TagPlan
from turnwise.data import Trajectory
from turnwise.errors import EngineError, TurnwiseError


@pytest.mark.parametrize(
    ("raised", "text"),
    [(EngineError("lost"), "^lost$"), (RuntimeError("CUDA"), "backend raised RuntimeError: CUDA for turn 1 of Lake")],
)
def test_an_error_of_the_backend_ends_the_batch_and_aborts_every_other_request(raised: Exception, text: str) -> None:
    async def answer(request: Request) -> None:
        if request.order == (0, 0, 1, 0, 1):
            raise raised
        if request.order[-1] == 1:
            await asyncio.sleep(60)

    backend = Backend(answer)
    with pytest.raises(EngineError, match=text):
        batch([plan([])], backend=backend)
    assert sorted(r.order for r in backend.aborted) == [(0, 0, 0, 0, 1), (0, 1, 0, 0, 1), (0, 1, 1, 0, 1)]
    assert backend.events[-1] == 0


def test_a_request_that_is_never_answered_ends_the_batch() -> None:
    async def answer(request: Request) -> None:
        if request.order == (0, 1, 0, 0, 2):
            await asyncio.sleep(60)

    start = time.monotonic()
    with pytest.raises(
        EngineError, match=r"turn 2 of Lake, group 1, member 0, attempt 0 within request_timeout: 0\.1 s"
    ):
        batch([plan([])], evolve(CALM, request_timeout=0.1), Backend(answer))
    assert time.monotonic() - start < 2


def test_a_backend_that_cancels_a_request_ends_the_batch_instead_of_hanging_it() -> None:
    async def answer(request: Request) -> None:
        raise asyncio.CancelledError

    with pytest.raises(EngineError, match="cancelled an episode"):
        batch([plan([])], backend=Backend(answer))


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_manager_no_longer_waits_for_is_aborted_when_its_episode_ends(fails: bool) -> None:
    async def answer(request: Request) -> None:
        if request.order[-1] == 9:
            await asyncio.sleep(60)

    class Impatient(Manager):
        async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await sampler.generate(turn=9, ids=np.array([1], np.int32), max_new_tokens=4)
            if fails and episode.attempt == 0:
                raise RuntimeError("no more")
            return await super().run(episode, sampler)

    async def run() -> None:
        backend = Backend(answer)
        scheduler = schedule([evolve(plan([]), manager=Impatient())], evolve(CALM, max_env_failure_rate=0.9), backend)
        await scheduler.next_batch(0, version=0)
        assert len(backend.aborted) == (8 if fails else 4)
        await scheduler.close()

    asyncio.run(run())


class Odd(BaseException):
    """Neither an Exception nor a cancellation: what `sys.exit` and a test's own failure are, too."""


def ends(plans: list[TagPlan], backend: Backend) -> None:
    """Play a batch that must end, within seconds."""

    async def run() -> None:
        scheduler = schedule(plans, CALM, backend)
        try:
            await asyncio.wait_for(scheduler.next_batch(0, version=0), 5)
        finally:
            await scheduler.close()

    asyncio.run(run())


@pytest.mark.parametrize("error", [Odd("odd"), SystemExit(0), GeneratorExit()])
def test_a_manager_that_ends_its_task_by_no_exception_ends_the_batch_with_the_error(error: BaseException) -> None:
    class Leaves(Manager):
        async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
            if (episode.group, episode.member) == (1, 0):
                raise error
            return await super().run(episode, sampler)

    log: list[Any] = []
    backend = Backend()
    with pytest.raises(
        TurnwiseError, match=rf"^Lake, group 1, member 0: the episode ended by {type(error).__name__}"
    ) as caught:
        ends([evolve(plan(log), manager=Leaves())], backend)
    assert caught.value.__cause__ is error
    assert backend.events[-1] == 0
    if not isinstance(
        error, GeneratorExit
    ):  # what is thrown into a coroutine that is dropped: it may await nothing more
        assert sum(entry[0] == "closed" for entry in log) == 4  # its environment, too


@pytest.mark.parametrize("error", [Odd("odd"), SystemExit(0)])
def test_a_backend_that_raises_no_exception_ends_the_batch_with_the_error(error: BaseException) -> None:
    async def answer(request: Request) -> None:
        if request.order == (0, 0, 1, 0, 1):
            raise error

    with pytest.raises(
        EngineError, match=rf"backend raised {type(error).__name__}: .* for turn 1 of Lake, group 0, member 1"
    ) as caught:
        ends([plan([])], Backend(answer))
    assert caught.value.__cause__ is error


def test_an_episode_whose_task_is_cancelled_before_it_begins_ends_the_batch() -> None:
    async def run() -> None:
        scheduler = schedule([plan([])], CALM, Backend())
        playing = asyncio.ensure_future(scheduler.next_batch(0, version=0))
        asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in asyncio.all_tasks() - {me, playing}])
        with pytest.raises(EngineError, match="cancelled an episode"):
            await asyncio.wait_for(playing, 5)
        await scheduler.close()

    async def main() -> None:
        nonlocal me
        me = asyncio.current_task()
        await run()

    me: asyncio.Task[Any] | None = None
    asyncio.run(main())


def test_cancelling_a_batch_leaves_no_task_and_no_thread_that_waits() -> None:
    async def answer(request: Request) -> None:
        if request.order[2] == 0:
            await asyncio.sleep(60)

    backend = Backend(answer)
    log: list[Any] = []
    slow = plan(log, lambda world, what: time.sleep(0.3) if what == "step" else None, step="thread")

    async def run() -> None:
        scheduler = schedule([slow], CALM, backend)
        playing = asyncio.ensure_future(scheduler.next_batch(0, version=0))
        await asyncio.sleep(0.1)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len(backend.aborted) == 2
        await scheduler.close()

    asyncio.run(run())
    assert backend.events[-1] == 0
    end = time.monotonic() + 3
    while any(thread.name == "environment Lake" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert sum(entry[0] == "closed" for entry in log) == 4
