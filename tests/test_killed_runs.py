"""A sample of `tests/killed_runs.py`: asynchronous runs that are killed at random moments and resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_runs_that_are_killed_at_random_moments_lose_nothing() -> None:
    # In a process of its own, for it forks.
    script = Path(__file__).with_name("killed_runs.py")
    done = subprocess.run([sys.executable, script, "3", "7"], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 runs with faults") == 3


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_on_ray_that_are_killed_at_random_moments_lose_nothing() -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    script = Path(__file__).with_name("killed_ray_runs.py")
    done = subprocess.run([sys.executable, script, "2", "1"], capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 runs with faults") == 1
