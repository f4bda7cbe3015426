"""What surrounds a run: one run at a time in an output folder, and what ends its waiting: Ctrl-C, and the end of a role."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import signal
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

from turnwise.errors import MachineError

log = logging.getLogger("turnwise")


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder; the system frees it when the process ends, however it ends. Raises MachineError if it is held."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MachineError(f"output_dir: another run is writing into {folder}. Fix: wait for its end, or choose another output_dir.") from error
        yield


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM set `stop`, a request to stop at the next safe point; a second one ends at once."""
    loop = asyncio.get_running_loop()
    installed = []

    def ask() -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        log.warning("stopping at the next safe point and saving; once more stops at once")
        stop.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not on the main thread
            loop.add_signal_handler(name, ask)
            installed.append(name)
    try:
        yield
    finally:
        for name in installed:
            loop.remove_signal_handler(name)


async def unless(work: Coroutine[Any, Any, Any], stop: asyncio.Event, watches: Iterable[Coroutine[Any, Any, None]]) -> tuple[bool, Any]:
    """(True, the result of `work`), or (False, None) once `stop` is set. Raises what `work` raises, or a watch, which otherwise never ends.

    What has not ended is cancelled."""
    task, asked, alive = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait()), [asyncio.ensure_future(watch) for watch in watches]
    every: list[asyncio.Future[Any]] = [task, asked, *alive]
    try:
        await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
        for watch in alive:
            if watch.done():
                watch.result()
        if task.done() and (task.exception() is not None or not stop.is_set()):
            return True, task.result()
    finally:
        for one in every:
            one.cancel()
        await asyncio.gather(*every, return_exceptions=True)
    return False, None
