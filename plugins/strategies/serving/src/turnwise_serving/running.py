"""Requests under way: each in a task of its own, given up one by one or all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from turnwise.contracts.inference import Request
from turnwise.errors import EngineError

T = TypeVar("T")
CLOSED = "the backend was closed"


class Running:
    """The tasks of one backend's requests."""

    def __init__(self) -> None:
        self._tasks: dict[Request, asyncio.Task[Any]] = {}
        self._reasons: dict[asyncio.Task[Any], str] = {}

    async def of(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises; EngineError with the reason where `break_off` ended it."""
        # A task of its own, so that `abort` can cancel the request without cancelling whoever waits for it.
        task = asyncio.ensure_future(work)
        self._tasks[request] = task
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

    async def close(self) -> None:
        """Cancel all, and wait until they have ended."""
        await asyncio.gather(*self.break_off(CLOSED), return_exceptions=True)
