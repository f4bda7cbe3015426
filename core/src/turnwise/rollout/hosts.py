"""A host keeps one environment instance and runs its calls inline, in a thread of its own, or in a process of its
own."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any

from turnwise.contracts.rollout import EnvironmentTimeout, StepMode
from turnwise.errors import EnvironmentFailure, one_line
from turnwise.rollout.origin import raised
from turnwise.rollout.process import CallError, ProcessEnvironment, invoke
from turnwise.rollout.sweeper import Sweeper

logger = logging.getLogger(__name__)


# Any, here and in `turnwise.rollout.process`: arguments and results of a stranger's methods, which the checks of the
# contract look at afterwards.


class Host(ABC):
    """One environment instance; one call at a time.

    A call that fails raises EnvironmentFailure, chained to its cause. A call that hangs, or whose caller is cancelled,
    leaves the host
    `lost`: nothing is called on it again.
    """

    # Any: an environment, which has Gymnasium's methods
    def __init__(self, tag: str, build: Callable[[], Any], sweeper: Sweeper) -> None:
        self.tag = tag
        self.build = build
        self.sweeper = sweeper
        self.built = False
        self.lost = False

    # Any: what the environment takes and gives
    async def call(self, method: str, timeout: float, **arguments: Any) -> Any:
        """Run `start` (of a process), `build`, `reset`, `step`, `render` or `close` and return its result.

        A coroutine is awaited on the event loop."""
        try:
            result = await self._run(method, timeout, arguments)
            if hasattr(result, "__await__"):
                result = await self._await(result, method, timeout)
        except asyncio.CancelledError:
            self.abandon()
            raise
        except EnvironmentTimeout:
            raise
        except (Exception, SystemExit) as error:
            what = str(error) if isinstance(error, CallError) else raised(error)
            raise EnvironmentFailure(f"{self.tag}.{method} {what}") from error
        # Only what was built has something to close.
        self.built |= method == "build"
        return result

    async def close(self, timeout: float) -> None:
        """Close the environment and end the host; an error in it is logged, for nobody can act on it."""
        if self.built and not self.lost:
            try:
                await self.call("close", timeout)
            except EnvironmentFailure as failure:
                logger.warning("%s", failure)
        self._end()

    async def discard(self, timeout: float) -> None:
        """Close an environment that nobody needs any more; a thread or process does it in its own time."""
        if not self.lost:
            await self.close(timeout)

    def abandon(self) -> None:
        """Give up on an environment whose call may still be running, without waiting for it."""
        if not self.lost:
            self.lost = True
            self._end()

    @abstractmethod
    async def _run(self, method: str, timeout: float, arguments: dict[str, Any]) -> Any:
        """Run the call where this host runs calls."""

    @abstractmethod
    def _end(self) -> None:
        """Let go of what the host holds, without waiting."""

    async def _await(self, awaitable: Awaitable[Any], method: str, timeout: float) -> Any:
        # A task of its own with a future beside it: a coroutine that ignores its cancellation must not hold the caller.
        task = asyncio.ensure_future(awaitable)
        done = asyncio.get_running_loop().create_future()

        def finish(task: asyncio.Future[Any]) -> None:
            if not done.done():
                done.set_result(None)
            elif not task.cancelled():
                task.exception()  # of a call that was given up: seen, so that asyncio does not complain

        task.add_done_callback(finish)
        try:
            await self._in_time(done, method, timeout)
        except BaseException:
            task.cancel()
            raise
        if task.cancelled():
            raise CallError("was cancelled from within")
        return task.result()

    async def _in_time(self, future: asyncio.Future[Any], method: str, timeout: float) -> Any:
        def expire() -> None:
            if not future.done():
                self.abandon()
                key = "reset_timeout" if method in ("start", "build", "reset") else "step_timeout"
                future.set_exception(
                    EnvironmentTimeout(f"{self.tag}.{method} did not return within {timeout:g} s ({key})")
                )

        key = self.sweeper.watch(timeout, expire)
        try:
            return await future
        finally:
            self.sweeper.release(key)


class InlineHost(Host):
    """Calls run on the event loop. Nothing can interrupt a plain function there: timeouts hold for coroutines only, and
    a hanging environment stops the whole run. For environments of microseconds, and for debugging."""

    _environment: Any = None

    async def _run(self, method: str, timeout: float, arguments: dict[str, Any]) -> Any:
        if method == "build":
            self._environment = self.build()
            return None
        return invoke(self._environment, method, arguments)

    def _end(self) -> None:
        self._environment = None


class ThreadHost(Host):
    """Calls run in one daemon thread of the environment's own, so that libraries which are bound to a thread work.

    When a call hangs, the thread is abandoned: it closes its environment and ends if the call ever returns.
    """

    # Any: an environment, which has Gymnasium's methods
    def __init__(self, tag: str, build: Callable[[], Any], sweeper: Sweeper) -> None:
        super().__init__(tag, build, sweeper)
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def _run(self, method: str, timeout: float, arguments: dict[str, Any]) -> Any:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=f"environment {self.tag}", daemon=True)
            thread.start()
            self._thread = thread
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._jobs.put((loop, future, method, arguments))
        # An error travels as a value: a future whose exception nobody fetches any more would be logged.
        value, error = await self._in_time(future, method, timeout)
        if error is not None:
            raise error
        return value

    async def discard(self, timeout: float) -> None:
        """Let the thread close the environment and end."""
        if not self.lost:
            self._end()

    def _end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        environment: Any = None
        while (job := self._jobs.get()) is not None:
            loop, future, method, arguments = job
            value: Any = None
            error: BaseException | None = None
            try:
                if method in ("start", "build"):
                    environment = self._made(environment, method)
                else:
                    value = invoke(environment, method, arguments)
            except BaseException as raising:  # an environment that calls sys.exit() has failed, too
                error = raising if isinstance(raising, Exception) else CallError(raised(raising))
            if method == "close":
                environment = None
            _post(loop, future, (value, error))
        if environment is not None:
            try:
                closing = invoke(environment, "close", {})
                if inspect.iscoroutine(closing):
                    asyncio.run(closing)
            except Exception as error:
                logger.warning("%s.close raised %s", self.tag, one_line(error))

    def _made(self, environment: Any, method: str) -> Any:
        """The environment after `build`."""
        return self.build()


class ProcessHost(ThreadHost):
    """Calls run in a process of the environment's own; the host's thread waits for the answers. A hang kills the
    process.

    `start` starts the process alone, which may take longer than anything that the environment does; `build` does it
    where that was not called before.
    """

    _process: ProcessEnvironment | None = None

    def _made(self, environment: Any, method: str) -> ProcessEnvironment:
        if self._process is None:
            self._process = ProcessEnvironment(self.build)
            if self.lost:  # given up before the process was there to be killed
                self._process.kill()
            self._process.start()
        if method == "build":
            self._process.build()
        return self._process

    def _end(self) -> None:
        if self.lost and self._process is not None:
            self._process.kill()
        super()._end()


HOSTS: dict[StepMode, type[Host]] = {"inline": InlineHost, "thread": ThreadHost, "process": ProcessHost}


def _post(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], outcome: tuple[Any, BaseException | None]
) -> None:
    def resolve() -> None:
        if not future.done():
            future.set_result(outcome)
        elif inspect.iscoroutine(outcome[0]):
            # A coroutine that nobody awaits any more would be warned of when it is collected.
            outcome[0].close()

    if not loop.is_closed():  # an abandoned call may outlive the run
        try:
            loop.call_soon_threadsafe(resolve)
        except RuntimeError:
            logger.debug("the event loop ended before %s", outcome)
