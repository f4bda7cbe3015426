"""A clock for tests that is not the machine's: time passes only when nobody has anything left to do, so what happens
when is the same in every run.

On this loop a tick is a second of `asyncio.sleep`: with `FakeBackendConfig(token=1)` every sampled token takes one,
with `FakeRuntimeConfig(update=C)` every update of a trainer C. Sampler and trainer wait for each other, whatever the
machine is doing, and weights that come in mid-sentence come after the same token every time.

What works on threads and processes of its own (`step: thread`, runtime `local`) has no place here: time would not wait
for it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumps(selectors.DefaultSelector):
    """Waits for no timer: the time until then passes at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What has come. Without a timer only something from outside can go on, a signal: that is waited for."""
        # 0 where something is ready: what runs now takes no time.
        if timeout:
            self.now += timeout
        return super().select(None if timeout is None else 0)


class TickLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while anything can run, and then is that of the next timer. `time()` begins
    at 0."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Ticks since the loop was made."""
        return self._jumps.now

    # Any: as BaseEventLoop has it
    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Here and at once, in no time: a thread would end at another moment in every run."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_in_ticks(main: Coroutine[Any, Any, T]) -> T:  # Any: as asyncio.run
    """As `asyncio.run`, on a loop of ticks."""
    with asyncio.Runner(loop_factory=TickLoop) as runner:
        return runner.run(main)
