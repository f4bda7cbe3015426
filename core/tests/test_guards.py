"""One run at a time in an output folder."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.errors import MachineError, TrainerError
from turnwise.pipeline.guards import alone_in, unless

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
            pytest.raises(MachineError, match=r"another run is writing into .* Fix: wait for its end, or choose another output_dir"),
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
        assert await unless(answers(), asyncio.Event(), [waits(cancelled)]) == (True, "done")
        assert cancelled == ["cancelled"]
        with pytest.raises(TrainerError):
            await unless(dies(), asyncio.Event(), [])

    asyncio.run(whole())


def test_work_is_cancelled_by_a_stop_and_by_the_end_of_a_role_that_it_does_not_ask() -> None:
    async def whole() -> None:
        stop, cancelled = asyncio.Event(), list[str]()
        asyncio.get_running_loop().call_later(0.01, stop.set)
        assert await unless(waits(cancelled), stop, [waits([])]) == (False, None)
        with pytest.raises(TrainerError, match="rank 1 died"):
            await unless(waits(cancelled), asyncio.Event(), [dies(), waits([])])
        assert cancelled == ["cancelled"] * 2

    asyncio.run(whole())
