"""The local runtime: every role in this process; a training strategy works on a thread of its own, so that the event
loop stays free."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import InferenceBackend
from turnwise.contracts.rollout import RolloutSettings, TagPlan
from turnwise.contracts.runtime import (
    RuntimeCapabilities,
    RuntimeContext,
    ServePlan,
    StrategyRole,
    TrainPlan,
    TrainRole,
)
from turnwise.contracts.train import TrainStrategy
from turnwise.errors import TrainerError, boundary
from turnwise.plugins import registry

T = TypeVar("T")
_Call: TypeAlias = tuple[Callable[[], Any], str, asyncio.AbstractEventLoop, asyncio.Future[Any]]


GRACE_SECONDS = 10.0
"""How long a call that was given up may take to end, where another is to follow it."""


class LocalRole(StrategyRole):
    """A training strategy on its own daemon thread. Calls run one after the other; a call past the timeout ends the run
    by name."""

    def __init__(self, role: str, timeout: float) -> None:
        self._role = role
        self._timeout = timeout
        self._work: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # daemon: a call that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name=f"turnwise-{role}", daemon=True)
        self._thread.start()
        self._strategy: TrainStrategy | None = None
        self._left_behind = False

    @classmethod
    async def start(cls, plan: TrainPlan, timeout: float) -> LocalRole:
        """Build the strategy on a thread of its own."""
        role = cls(plan.role, timeout)
        try:
            role._strategy = await role._submit(
                lambda: registry().build("train_strategy", plan.implementation, plan.config, plan.context), "start"
            )
        finally:
            if role._strategy is None:
                role._work.put(None)
        return role

    async def run(self, method: str, work: Callable[[TrainStrategy], T]) -> T:
        """Run a method of the strategy on its thread; its exception is raised here."""
        strategy = self._strategy
        if strategy is None:
            raise TrainerError(f"{self._role}: {method} was called after close")
        if self._left_behind:
            await self._free(method)
        return await self._submit(lambda: work(strategy), method)

    async def _free(self, method: str) -> None:
        """Wait for a call that was given up: until it ends, no other begins. Raises TrainerError where it does not,
        within the grace."""
        try:
            await asyncio.wait_for(self._submit(lambda: None, method), GRACE_SECONDS)
        except TimeoutError as error:
            raise TrainerError(
                f"{self._role}: {method} cannot begin, for an earlier call still runs. Fix: see what that one waits"
                " for."
            ) from error
        self._left_behind = False

    async def _submit(self, call: Callable[[], T], what: str) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._work.put((call, what, loop, future))
        try:
            # Shielded: the thread works on, and settles the future, whoever still waits.
            return await asyncio.wait_for(asyncio.shield(future), self._timeout)
        except asyncio.CancelledError:
            # Whoever waited has gone, and the thread works on: the next call must not queue up behind it without a
            # limit.
            self._left_behind |= not future.done()
            raise
        except TimeoutError as error:
            if future.done():  # the call itself raised TimeoutError
                raise
            self._left_behind = True
            raise TrainerError(
                f"{self._role}: {what} did not end within runtime_timeout = {self._timeout:g} s. Fix: raise"
                " runtime_timeout, or lower the batch."
            ) from error

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            call, what, loop, future = item
            try:
                with boundary(f"{self._role}: {what}", TrainerError):
                    outcome, error = call(), None
            except BaseException as problem:  # handed to whoever awaits the call
                outcome, error = None, problem
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(_settle, future, outcome, error)

    async def close(self) -> None:
        """Close the strategy and end the thread; may be called twice. A strategy that is still in a call which was
        given up is left behind."""
        try:
            if self._strategy is not None and not self._left_behind:
                await super().close()
        finally:
            self._strategy = None
            self._work.put(None)


def _settle(future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    elif isinstance(error, StopIteration):
        # A future refuses it.
        future.set_exception(RuntimeError("StopIteration left a strategy"))
    else:
        future.set_exception(error)
        future.exception()  # a caller that gave up is not a lost error


SWITCH_SECONDS = 0.0005
"""How long a thread may keep the interpreter from one that waits for it. torch lets go of it for every operation, so that a thread which samples
makes a trainer wait hundreds of times a step: at Python's 5 ms up to a tenth of it."""


class LocalRuntime:
    """Everything in one process: training strategies on threads of their own, inference backends as they are."""

    capabilities = RuntimeCapabilities(one_process=True)

    def __init__(self, config: None, context: RuntimeContext) -> None:
        self._timeout = context.timeout
        self._placed: list[TrainRole | InferenceBackend] = []
        self._before: dict[str, str | None] = {}
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._interval, SWITCH_SECONDS))

    async def train(self, plan: TrainPlan) -> TrainRole:
        """Build a training role, its environment variables set in this process until `close`."""
        self._set(plan.environment)
        role = await LocalRole.start(plan, self._timeout)
        self._placed.append(role)
        return role

    async def serve(self, plan: ServePlan) -> InferenceBackend:
        """Build the sampling role, its environment variables set in this process until `close`."""
        self._set(plan.environment)
        backend: InferenceBackend = registry().build(
            "inference_backend", plan.implementation, plan.config, plan.context
        )
        self._placed.append(backend)
        return backend

    def executor(
        self, plans: Sequence[TagPlan], settings: RolloutSettings, chat: Chat | None, backend: InferenceBackend
    ) -> None:
        """None: episodes are played on this event loop."""

    def _set(self, environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            # The first value is the one from before the run; a second role may set the same variable.
            self._before.setdefault(name, os.environ.get(name))
            os.environ[name] = value

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
        sys.setswitchinterval(self._interval)
        if errors:
            raise errors[0]
