"""The local runtime: every role in this process; a training strategy works on a thread of its own, so that the event loop stays free."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from typing import Any

from turnwise.contracts.runtime import RolePlan, RuntimeContext
from turnwise.errors import TrainerError
from turnwise.plugins import registry


class LocalHandle:
    """A training strategy on its own daemon thread. Calls run one after the other; a call past the timeout ends the run by name."""

    def __init__(self, plan: RolePlan, timeout: float) -> None:
        self._role = plan.role
        self._timeout = timeout
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"turnwise-{plan.role}", daemon=True)
        self._thread.start()
        self._target: Any = None
        self._plan = plan
        self._left_behind = False

    async def start(self) -> LocalHandle:
        """Build the strategy on its thread."""
        try:
            plan = self._plan
            self._target = await self._submit(lambda: registry().build(plan.kind, plan.implementation, plan.config, plan.context))
        finally:
            if self._target is None:
                self._work.put(None)
        return self

    async def call(self, method: str, *args: Any) -> Any:
        """Run a method of the strategy; its exception is raised here."""
        if self._target is None:
            raise TrainerError(f"{self._role}: {method} was called after close")
        return await self._submit(lambda: getattr(self._target, method)(*args), method)

    @property
    def transports(self) -> tuple[str, ...]:
        """The strategy's weight transports."""
        return tuple(self._target.transports)

    async def _submit(self, call: Any, what: str = "start") -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._work.put((call, loop, future))
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._timeout)
        except asyncio.CancelledError:
            self._left_behind |= not future.done()
            raise
        except TimeoutError as error:
            if future.done():  # the call itself raised TimeoutError
                raise
            self._left_behind = True
            raise TrainerError(
                f"{self._role}: {what} did not end within runtime_timeout = {self._timeout:g} s. Fix: raise runtime_timeout, or lower the batch."
            ) from error

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            call, loop, future = item
            try:
                outcome, error = call(), None
            except BaseException as problem:  # handed to whoever awaits the call
                outcome, error = None, problem
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(_settle, future, outcome, error)

    async def close(self) -> None:
        """Close the strategy and end the thread; may be called twice. A strategy that is still in a call which was given up is left behind."""
        try:
            if self._target is not None and not self._left_behind:
                await self.call("close")
        finally:
            self._target = None
            self._work.put(None)


def _settle(future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    elif isinstance(error, StopIteration):
        future.set_exception(RuntimeError("StopIteration left a strategy"))
    else:
        future.set_exception(error)
        future.exception()  # a caller that gave up is not a lost error


class LocalRuntime:
    """Everything in one process: handles for training strategies, inference backends as they are."""

    one_process = True

    def __init__(self, config: Any, context: RuntimeContext) -> None:
        self._timeout = context.timeout
        self._placed: list[Any] = []
        self._before: dict[str, str | None] = {}

    async def place(self, plan: RolePlan) -> Any:
        """Build the role, its environment variables set in this process until `close`."""
        for name, value in plan.environment.items():
            self._before.setdefault(name, os.environ.get(name))
            os.environ[name] = value
        if plan.kind == "inference_backend":
            placed = registry().build(plan.kind, plan.implementation, plan.config, plan.context)
        else:
            placed = await LocalHandle(plan, self._timeout).start()
        self._placed.append(placed)
        return placed

    async def close(self) -> None:
        """Close every role, the latest first; the first error is raised when all were asked."""
        errors: list[Exception] = []
        while self._placed:
            try:
                await self._placed.pop().close()
            except Exception as error:
                errors.append(error)
        while self._before:
            name, value = self._before.popitem()
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if errors:
            raise errors[0]
