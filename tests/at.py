"""Runs the command line and does something to its own process at the nth call of a function: `at.py MODULE:NAME NTH
ACTION ARGUMENT…`.

ACTION: `kill` (SIGKILL), `interrupt` (SIGINT, as Ctrl-C), `interrupt-twice`, `interrupt-and-wait` (the call does not
return before the process ends), `fill:BYTES` (no file may grow beyond, from now on). With TURNWISE_TEST_TICKS set, the
run has a clock of ticks: the nth call then finds it doing the same every time.
"""

import asyncio
import functools
import importlib
import os
import resource
import signal
import sys
import time
from typing import Any

from turnwise.cli.main import main
from turnwise.testing.ticks import run_in_ticks


def act(action: str) -> None:
    name, _, size = action.partition(":")
    if name == "fill":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
        return
    os.kill(os.getpid(), signal.SIGKILL if name == "kill" else signal.SIGINT)
    if name == "interrupt-and-wait":
        time.sleep(600)
    if name == "interrupt-twice":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)  # as long as an update may take


def watch(place: str, nth: int, action: str) -> None:
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def watched(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            act(action)
        return original(*args, **options)

    setattr(owner, name, watched)


if __name__ == "__main__":
    if os.environ.get("TURNWISE_TEST_TICKS"):
        asyncio.run = run_in_ticks  # type: ignore[assignment]
    watch(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.argv = ["turnwise", *sys.argv[4:]]
    main()
