"""Ranks of a test end together, whatever becomes of one."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from turnwise.testing import ranks
from turnwise.testing.ranks import run_ranks


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_codes_and_words_of_every_rank_come_back(tmp_path: Path) -> None:
    codes, said = run_ranks(
        lambda rank: python(f"import os; print('I am', {rank}, os.environ['MARK'])"),
        2,
        tmp_path,
        environment={"MARK": "here"},
    )
    assert codes == [0, 0]
    assert "said-0.txt: I am 0 here" in said
    assert "said-1.txt: I am 1 here" in said


def test_who_waits_for_a_rank_that_failed_is_ended_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.2)
    began = time.monotonic()
    codes, said = run_ranks(
        lambda rank: python("import sys; sys.exit('lost')" if rank else "import time; time.sleep(60)"), 2, tmp_path
    )
    assert codes == [-signal.SIGTERM, 1]
    assert "said-1.txt: lost" in said
    assert time.monotonic() - began < 30


def test_none_outlives_the_timeout(tmp_path: Path) -> None:
    assert (
        run_ranks(lambda rank: python("import time; time.sleep(60)"), 2, tmp_path, timeout=0.2)[0]
        == [-signal.SIGTERM] * 2
    )
