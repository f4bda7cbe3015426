"""One thread that samples: batches one after the other, other work between two tokens, a pause, an end that leaves
nobody waiting."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from turnwise.errors import EngineError

_Job = tuple[Future[Any], Callable[[], Any]]


class Worker:
    """Runs `submit`ted batches in order, never while paused. A job of `between` runs between two batches, or between
    two tokens of one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._batches: deque[_Job] = deque()
        self._between: deque[_Job] = deque()
        self._paused = self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue a batch. Its future holds what `work` returned or raised."""
        return self._put(self._batches, work)

    def between(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue a job that waits for no batch to end."""
        return self._put(self._between, work)

    def pause(self) -> Future[Any]:
        """Start no batch and no token from now on; the future is done when the token in progress is."""
        self._set_paused(True)
        return self.between(lambda: None)

    def resume(self) -> None:
        """Undo `pause`."""
        self._set_paused(False)

    def checkpoint(self, let_go: Callable[[], None], take_again: Callable[[], None]) -> None:
        """Called by a batch between two tokens: runs waiting jobs and sits out a pause, in between `let_go` and
        `take_again`.

        Raises EngineError when the worker is closed meanwhile.
        """
        if not (self._paused or self._between or self._closed):
            return
        # A waiting job may write the very weights that the batch reads.
        let_go()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._between or self._closed or not self._paused)
                    if self._closed:
                        raise EngineError("the backend was closed while it sampled")
                    if not self._between:
                        return
                    job = self._between.popleft()
                _run(job)
        finally:
            take_again()

    def close(self) -> None:
        """End the thread after the token in progress; whatever waits fails with EngineError. May be called twice."""
        with self._changed:
            self._closed = True
            waiting = [*self._batches, *self._between]
            self._batches.clear()
            self._between.clear()
            self._changed.notify_all()
        for future, _ in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError("the backend was closed"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _put(self, queue: deque[_Job], work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise EngineError("the backend is closed")
            queue.append((future, work))
            if self._thread is None:
                # A daemon: an interpreter that ends without `close` does not wait for a paused batch.
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return future

    def _set_paused(self, paused: bool) -> None:
        with self._changed:
            self._paused = paused
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._between or (self._batches and not self._paused))
                if self._closed:
                    return
                job = self._between.popleft() if self._between else self._batches.popleft()
            _run(job)


def _run(job: _Job) -> None:
    future, work = job
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    # Everything reaches the one who waits for the future; the thread lives on for the next batch.
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
