"""What runs in a checker's process: requests as JSON lines come in, outcomes go out, and it ends itself over the
time."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from typing import Any

LARGEST_MEMORY = 4 << 30
"""Bytes of address space: towers of powers ask for more than any machine has."""


def main() -> None:
    """Answer until the input ends."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (LARGEST_MEMORY, LARGEST_MEMORY))
    # Of the run alone: Ctrl-C reaches every process of a terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()
    import math_verify

    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # The system's own way to end a process, without Python's help: a power of large numbers holds its lock.
        signal.setitimer(signal.ITIMER_REAL, request["timeout"])
        outcome = compared(math_verify, request["answers"], request["response"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(outcome), flush=True)


def compared(math_verify: Any, answers: list[str], response: str) -> str:
    """`right`, `wrong`, or `unreadable`: none of `answers` is mathematics."""
    golds = [gold for gold in (_gold(math_verify, answer) for answer in answers) if gold]
    if not golds:
        return "unreadable"
    given = _read(math_verify, response)
    return "right" if given and any(_equal(math_verify, gold, given) for gold in golds) else "wrong"


def _gold(math_verify: Any, answer: str) -> list[Any]:
    """A known answer as it stands, else as a formula without its marks."""
    return _read(math_verify, answer) or _read(math_verify, f"${answer}$")


def _read(math_verify: Any, text: str) -> list[Any]:
    try:
        found: list[Any] = math_verify.parse(text, parsing_timeout=None)
        return found
    except (Exception, RecursionError):  # what a model writes may fail in any way
        return []


def _equal(math_verify: Any, gold: list[Any], given: list[Any]) -> bool:
    try:
        return bool(math_verify.verify(gold, given, timeout_seconds=None))
    except (Exception, RecursionError):
        return False


if __name__ == "__main__":
    main()
