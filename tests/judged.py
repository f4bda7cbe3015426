"""What the scripts that break something share: a command is run, what should not be of its answer is said, and every
case that has such a fault is printed.

A case is anything with a `name`; a script gives its own `judge`. Scripts and tests import one another by name: this
folder is on the search path of both."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from click.testing import CliRunner

from turnwise.cli.main import main

SECONDS = 30
"""What one command may take, on a machine that does other things as well."""
SAID = ("error: ", "config: ", "machine: ")


class Result(NamedTuple):
    """What a command answered: exit code, output, errors, what was raised but SystemExit, and how long it took."""

    code: int
    out: str
    err: str
    raised: BaseException | None
    seconds: float


class Case(Protocol):
    """Something broken."""

    @property
    def name(self) -> str:
        """What is wrong with it."""
        ...


Judged = TypeVar("Judged", bound=Case)


def _ring(*_: Any) -> None:
    raise KeyboardInterrupt  # which no guard of a stranger's code holds back


def run(command: list[str]) -> Result:
    """What one command of the command line answers; it is ended after SECONDS."""
    before = signal.signal(signal.SIGALRM, _ring)
    signal.alarm(SECONDS)
    began = time.monotonic()
    try:
        result = CliRunner().invoke(main, command)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    raised = None if isinstance(result.exception, SystemExit) else result.exception
    return Result(result.exit_code, result.stdout, result.stderr, raised, time.monotonic() - began)


def faults_of(command: str, result: Result, about: str, seconds: float = 10) -> Iterator[str]:
    """What should not be of what a command answered: every line of an error holds `about` and the fix."""
    if result.raised is not None:
        yield f"{command}: traceback: {type(result.raised).__name__}: {result.raised!s:.200}"
    elif result.seconds > seconds:
        yield f"{command}: {result.seconds:.0f} s"
    lines = [line for line in result.err.splitlines() if line.startswith(SAID)]
    if bool(lines) != bool(result.code):
        yield f"{command}: exit {result.code} and {len(lines)} errors: {result.err[-300:]}"
    for line in lines:
        if "Fix: " not in line or about not in line or "the run failed" in line or len(line) > 1000:
            yield f"{command}: {line:.400}"


@contextmanager
def current(folder: Path) -> Iterator[Path]:
    """`folder` as the current one."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


def empty() -> None:
    """Everything in the current folder is gone."""
    for path in Path().iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def judge_all(what: str, cases: Iterable[Judged], judge: Callable[[Judged], list[str]]) -> int:
    """Judge every case, in one new folder, and print its faults; how many cases have one."""
    bad, every = 0, list(cases)
    with tempfile.TemporaryDirectory() as folder, current(Path(folder)):
        for one in every:
            began = time.monotonic()
            if faults := judge(one):
                bad += 1
                print(f"--- {one.name} ({time.monotonic() - began:.1f} s)\n" + "\n".join(faults), flush=True)
    print(f"{len(every)} {what}, {bad} with faults")
    return bad
