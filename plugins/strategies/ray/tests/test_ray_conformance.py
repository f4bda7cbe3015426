"""The runtime keeps the contract of its kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed (pip install 'turnwise-ray[ray]')")
pytestmark = [pytest.mark.engines]


def test_the_conformance_kit_passes_without_a_skip(tmp_path: Path) -> None:
    code = (
        "from turnwise.testing.kit import run_conformance\nraise SystemExit(run_conformance('ray', kind='runtime',"
        " strict=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
