"""What surrounds a run: one run at a time in an output folder, and what ends its waiting: Ctrl-C, and the end of a
role."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from turnwise.contracts.runtime import TrainRole
from turnwise.errors import MachineError

log = logging.getLogger("turnwise")

T = TypeVar("T")

INTERRUPTED = 128 + signal.SIGINT
"""The exit status of a process that Ctrl-C has ended, as shells report it."""

_STUCK_SECONDS = 2.0
"""How long a second signal may wait for the main thread to hear it."""


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder; the system frees it when the process ends, however it ends. Raises MachineError
    if it is held."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MachineError(
                f"output_dir: another run is writing into {folder}. Fix: wait for its end, or choose another"
                " output_dir."
            ) from error
        yield


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM set `stop`, a request to stop at the next safe point; a second one ends at once, whatever the
    event loop does.

    Plain handlers, not those of asyncio, which run between two callbacks only: a step that hangs on the loop, or a
    regular expression that backtracks for ever, would keep every signal waiting. Not on the main thread there are no
    signals to hear.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    heard = 0

    def ask() -> None:
        log.warning("stopping at the next safe point and saving; once more stops at once")
        stop.set()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        heard += 1
        if heard == 1:
            loop.call_soon_threadsafe(ask)  # logging is not safe where a signal may have interrupted it
        elif heard == 2:
            raise KeyboardInterrupt  # out of the loop, or of the code that blocks it
        else:  # that code, or what closes the roles, did not let it through
            _end_at_once()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _heard(loop, lambda: heard > 1):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _heard(loop: asyncio.AbstractEventLoop, twice: Callable[[], bool]) -> Iterator[None]:
    """See to it that the handlers run. Where a second signal has come and `twice` stays false, the main thread is in C
    code, in
    which none does: the process is ended.

    The interpreter writes the number of every signal into a socket when it comes, and a thread reads it. The thread
    wakes the
    loop, too: a signal that the system gives to another thread does not interrupt the main one's waiting.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    left = threading.Event()

    def watch() -> None:
        came = 0
        while numbers := reader.recv(64):
            loop.call_soon_threadsafe(lambda: None)
            came += sum(number in (signal.SIGINT, signal.SIGTERM) for number in numbers)
            if came > 1 and not left.wait(_STUCK_SECONDS) and not twice():
                _end_at_once()

    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="turnwise-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()


def _end_at_once() -> None:
    os.write(2, b"stopped at once\n")
    os._exit(INTERRUPTED)


class Stopped(Exception):
    """A stop was asked for, and nothing is under way that changes weights: what is done can be saved."""


class Guard:
    """Lets the pipeline wait for what changes no weight, and notices meanwhile that the user wants to stop or that a
    training role is gone."""

    def __init__(self, stop: asyncio.Event, roles: Iterable[TrainRole]) -> None:
        self._stop, self._roles = stop, tuple(roles)

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stop.is_set()

    async def unless_stopped(
        self, work: Coroutine[Any, Any, T]
    ) -> T:  # Any: what a coroutine yields to asyncio concerns nobody
        """The result of `work`. Raises Stopped, what `work` raises, and the error of a role that is gone."""
        return await unless(work, self._stop, [role.watch() for role in self._roles])

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:  # Any: as in `unless_stopped`
        """The result of `work`, which a stop lets end. Raises what `work` raises, and the error of a role that is
        gone."""
        return await unless(work, asyncio.Event(), [role.watch() for role in self._roles])


async def unless(
    work: Coroutine[Any, Any, T],  # Any: as in `unless_stopped`
    stop: asyncio.Event,
    watches: Iterable[Coroutine[Any, Any, None]],
) -> T:
    """The result of `work`. Raises Stopped once `stop` is set, what `work` raises, or a watch, which otherwise never
    ends.

    What has not ended is cancelled."""
    task, asked, alive = (
        asyncio.ensure_future(work),
        asyncio.ensure_future(stop.wait()),
        [asyncio.ensure_future(watch) for watch in watches],
    )
    every: list[asyncio.Future[Any]] = [task, asked, *alive]
    try:
        await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
        for watch in alive:
            if watch.done():
                watch.result()
        # The result of work that ended together with the request to stop is given up, for whoever resumes repeats it.
        if task.done() and (task.exception() is not None or not stop.is_set()):
            return task.result()
        raise Stopped
    finally:
        for one in every:
            one.cancel()
        await asyncio.gather(*every, return_exceptions=True)
