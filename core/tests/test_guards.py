"""One run at a time in an output folder, and what ends its waiting: Ctrl-C, whatever the event loop does, and the end
of a role."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnwise.errors import MachineError, TrainerError
from turnwise.pipeline.guards import Stopped, alone_in, unless

HOLD = """
import sys, time
from pathlib import Path
from turnwise.pipeline.guards import alone_in

with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_has_ended_however_it_ends(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with (
            pytest.raises(
                MachineError,
                match=r"another run is writing into .* Fix: wait for its end, or choose another output_dir",
            ),
            alone_in(tmp_path),
        ):
            pass
    finally:
        first.kill()
        first.communicate()
    with alone_in(tmp_path):
        pass
    with alone_in(tmp_path):  # and it is free again afterwards
        pass


async def answers() -> str:
    await asyncio.sleep(0)
    return "done"


async def waits(cancelled: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled.append("cancelled")
        raise


async def dies() -> None:
    raise TrainerError("rank 1 died")


def test_work_ends_with_its_result_or_its_error() -> None:
    async def whole() -> None:
        cancelled: list[str] = []
        assert await unless(answers(), asyncio.Event(), [waits(cancelled)]) == "done"
        assert cancelled == ["cancelled"]
        with pytest.raises(TrainerError):
            await unless(dies(), asyncio.Event(), [])

    asyncio.run(whole())


def test_work_is_cancelled_by_a_stop_and_by_the_end_of_a_role_that_it_does_not_ask() -> None:
    async def whole() -> None:
        stop, cancelled = asyncio.Event(), list[str]()
        asyncio.get_running_loop().call_later(0.01, stop.set)
        with pytest.raises(Stopped):
            await unless(waits(cancelled), stop, [waits([])])
        with pytest.raises(TrainerError, match="rank 1 died"):
            await unless(waits(cancelled), asyncio.Event(), [dies(), waits([])])
        assert cancelled == ["cancelled"] * 2

    asyncio.run(whole())


BLOCKED = """
import asyncio, hashlib, re, sys, time
from turnwise.pipeline.guards import stop_on_signals

async def main():
    stop = asyncio.Event()
    with stop_on_signals(stop):
        await asyncio.sleep(0)
        print("blocked", flush=True)
        {}
        await stop.wait()
        print("asked", flush=True)
        await asyncio.sleep(60)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    "block",
    [
        "time.sleep(60)",
        "re.fullmatch('(a+)+b', 'a' * 60)",
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 2_000_000_000)",  # in C, where no handler of Python runs
        "pass",  # the loop is free
    ],
)
def test_a_second_signal_ends_the_process_while_the_event_loop_is_blocked(block: str) -> None:
    running = subprocess.Popen([sys.executable, "-c", BLOCKED.format(block)], stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "blocked\n"
        time.sleep(0.3)
        for _ in range(2):
            assert running.poll() is None
            running.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert running.wait(timeout=20) == 130
    finally:
        running.kill()
        running.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_third_signal_ends_a_process_that_swallows_the_second() -> None:
    deaf = "\n        while True:\n            try: time.sleep(60)\n            except BaseException: pass\n"
    running = subprocess.Popen([sys.executable, "-c", BLOCKED.format(deaf)], stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "blocked\n"
        for _ in range(3):
            time.sleep(0.3)
            assert running.poll() is None
            running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=20) == 130
    finally:
        running.kill()
        running.communicate()
