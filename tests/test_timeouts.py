"""A test that runs over its time fails, whatever it hangs in, and the tests beside it run on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HANGING = """\
import asyncio, contextlib, threading, time

def test_before():
    pass

# What a signal raises would become the result of a task that nobody waits for,
def test_a_task_that_blocks_the_loop():
    async def blocks():
        time.sleep(60)
    async def scene():
        asyncio.create_task(blocks())
        await asyncio.Event().wait()
    asyncio.run(scene())

# or end the loop, whose end waits for its threads,
def test_a_thread_of_the_loop():
    async def scene():
        await asyncio.to_thread(threading.Event().wait)
    asyncio.run(scene())

def test_between():
    pass

# or be taken for one of the errors that are expected.
def test_what_swallows_every_error():
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)

def test_after():
    pass
"""


@pytest.mark.slow
def test_a_test_over_its_time_fails_and_the_others_run_on(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(HANGING, encoding="utf-8")
    (tmp_path / "test_two.py").write_text("def test_beside():\n    pass\n", encoding="utf-8")
    ours = ["-c", ROOT / "pyproject.toml", "-p", "conftest", "--rootdir", tmp_path]
    command = [sys.executable, "-m", "pytest", *ours, "-n", "2", "--dist", "loadfile", "--timeout", "1", tmp_path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    for name in ("a_task_that_blocks_the_loop", "a_thread_of_the_loop", "what_swallows_every_error"):
        assert f"FAILED test_one.py::test_{name}" in done.stdout
    assert "3 failed, 4 passed" in done.stdout
    assert "Timeout (0:00:01)!" in done.stderr
    assert f'test_one.py", line {HANGING[: HANGING.index("time.sleep")].count(chr(10)) + 1} in blocks' in done.stderr
