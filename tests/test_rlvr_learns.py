"""The example of `rlvr` learns from random weights: generated questions that no training episode has seen, checked by a
rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "rlvr.yaml"
STEPS = 60


@pytest.mark.slow
def test_sixty_steps_answer_half_of_the_held_out_questions(make_run: Any) -> None:
    run = make_run("")
    result = run.command("train", str(EXAMPLE), f"max_steps={STEPS}", f"eval_steps={STEPS}", "output_dir=out")
    assert result.exit_code == 0, result.output + repr(result.exception)
    first, last = run.metrics()[0], run.metrics()[-1]
    assert last["step"] == STEPS
    assert first["val/NumbersHeldOut/failed"] == last["val/NumbersHeldOut/failed"] == 0  # all 256 questions were asked
    report = (run.folder / "out/report.md").read_text()
    rows = {
        name: float(value) for name, value in re.findall(r"^\| ([a-z][\w ]+) \|.* ([\d.]+) \|$", report, re.MULTILINE)
    }
    assert set(rows) == {"model at step 0", f"model at step {STEPS}", "random", "known_answer"}
    # Ten digits to choose from: by chance a tenth, of 256 with a standard error of 0.02.
    assert rows["random"] < 0.2
    assert rows["model at step 0"] < 0.2
    assert rows[f"model at step {STEPS}"] > 0.5
    assert rows["known_answer"] == 1.0
