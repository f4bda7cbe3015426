"""Processes that compare answers of mathematics: what a model writes may keep algebra busy for ever, and Python's lock
with it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from queue import LifoQueue
from threading import Lock
from typing import Any, Literal

from turnwise.errors import EnvironmentFailure

Outcome = Literal["right", "wrong", "slow", "unreadable"]


_making = Lock()


class Checkers:
    """As many processes as there are cores, at most four, each started when it is needed; threads wait for a free one."""

    def __init__(self, processes: int) -> None:
        self._free: LifoQueue[subprocess.Popen[str] | None] = LifoQueue()
        for _ in range(processes):
            self._free.put(None)

    @staticmethod
    def shared() -> Checkers:
        """Those of this process."""
        # Threads that ask first at the same moment must not have processes each.
        with _making:
            return _made()

    def compare(self, answers: Sequence[str], response: str, timeout: float) -> Outcome:
        """Whether a response's answer equals one of `answers`. `slow`: not within `timeout` seconds; `unreadable`: none of
        the answers is mathematics. Raises EnvironmentFailure: a checker does not start."""
        process = self._free.get()
        try:
            if process is not None and process.poll() is not None:
                _ended(process)
                process = None
            process = process or _started()
            found = _asked(process, {"answers": list(answers), "response": response, "timeout": timeout})
        except BaseException:
            _ended(process)
            process = None
            raise
        else:
            if found is None:  # it ended itself over the time
                _ended(process)
                process = None
            return found or "slow"
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End all that wait."""
        for process in list(self._free.queue):
            _ended(process)


@lru_cache(maxsize=1)
def _made() -> Checkers:
    made = Checkers(min(4, os.cpu_count() or 1))
    atexit.register(made.close)
    return made


def _started() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "turnwise_rlvr.checker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        _ended(process)
        raise EnvironmentFailure(
            f"the process that compares answers did not start (exit code {process.returncode}), rlvr. Fix: try {sys.executable}"
            " -m turnwise_rlvr.checker"
        )
    return process


def _asked(process: subprocess.Popen[str], request: dict[str, Any]) -> Outcome | None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if line:
            outcome: Outcome = json.loads(line)
            return outcome
    return None


def _ended(process: subprocess.Popen[str] | None) -> None:
    if process is None:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
