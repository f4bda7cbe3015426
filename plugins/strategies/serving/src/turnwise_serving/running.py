"""Requests under way: each in a task of its own, given up one by one, all at once, or when it takes too long."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

from turnwise.contracts.inference import Request
from turnwise.errors import EngineError

T = TypeVar("T")
CLOSED = "the backend was closed"


class Running:
    """The tasks of one backend's requests, which fail with `late` after `seconds` each; pauses do not count."""

    def __init__(self, seconds: float = math.inf, late: str = "") -> None:
        self._tasks: dict[Request, asyncio.Task[Any]] = {}
        self._reasons: dict[asyncio.Task[Any], str] = {}
        self._seconds, self._late, self._paused = seconds, late, False
        # The seconds left when the timer was started or, in a pause, stopped.
        self._clocks: dict[asyncio.Task[Any], tuple[float, asyncio.TimerHandle | None]] = {}

    async def of(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises; EngineError with the reason where `break_off` ended it, or its time was up."""
        # A task of its own, so that `abort` can cancel the request without cancelling whoever waits for it.
        task = asyncio.ensure_future(work)
        self._tasks[request] = task
        if self._seconds < math.inf:
            self._watch(task, self._seconds)
        try:
            return await task
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            # Whoever asked may have been cancelled at the same time: then that is what it wants to hear.
            if (why := self._reasons.get(task)) and asking is not None and not asking.cancelling():
                raise EngineError(why) from None
            raise
        finally:
            self._tasks.pop(request, None)
            self._reasons.pop(task, None)
            _, timer = self._clocks.pop(task, (0.0, None))
            if timer is not None:
                timer.cancel()

    def abort(self, request: Request) -> None:
        """Cancel one; a request that is not here is ignored."""
        if task := self._tasks.get(request):
            task.cancel()

    def break_off(self, why: str) -> list[asyncio.Task[Any]]:
        """Cancel all, which fail with `why`; returns their tasks."""
        tasks = list(self._tasks.values())
        for task in tasks:
            self._reasons[task] = why
            task.cancel()
        return tasks

    def pause(self) -> None:
        """From now on no time passes for requests."""
        if self._paused:
            return
        self._paused = True
        now = asyncio.get_running_loop().time()
        for task, (_, timer) in self._clocks.items():
            if timer is not None:
                timer.cancel()
                self._clocks[task] = timer.when() - now, None

    def resume(self) -> None:
        """Time goes on."""
        self._paused = False
        for task, (left, timer) in self._clocks.items():
            if timer is None:
                self._watch(task, left)

    def _watch(self, task: asyncio.Task[Any], left: float) -> None:
        timer = None if self._paused else asyncio.get_running_loop().call_later(left, self._expire, task)
        self._clocks[task] = left, timer

    def _expire(self, task: asyncio.Task[Any]) -> None:
        self._reasons[task] = self._late
        task.cancel()

    async def close(self) -> None:
        """Cancel all, and wait until they have ended."""
        await asyncio.gather(*self.break_off(CLOSED), return_exceptions=True)
