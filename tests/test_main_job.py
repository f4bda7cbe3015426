"""A short form of the main job learns: FrozenLake from random weights, on maps that no training episode has seen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "frozen_lake.yaml"
STEPS = 80


@pytest.mark.slow
def test_a_minute_of_the_main_job_reaches_40_percent_on_held_out_maps(make_run: Any) -> None:
    run = make_run("")
    result = run.command("train", str(EXAMPLE), f"max_steps={STEPS}", f"eval_steps={STEPS}", "output_dir=out")
    assert result.exit_code == 0, result.output + repr(result.exception)
    first, last = run.metrics()[0], run.metrics()[-1]
    success = "val/FrozenLakeHeldOut/success"
    assert last["step"] == STEPS
    assert (
        first["val/FrozenLakeHeldOut/failed"] == last["val/FrozenLakeHeldOut/failed"] == 0
    )  # all 512 maps were played
    assert first[success] < 0.25  # an untrained model is no better than the random player
    assert last[success] >= 0.40
    report = (run.folder / "out/report.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z][\w ]+) \|.* ([\d.]+) \|$", report, re.MULTILINE))
    assert set(rows) == {"model at step 0", f"model at step {STEPS}", "random", "frozen_lake_walker"}
    assert float(rows["random"]) < 0.30
    assert 0.6 < float(rows["frozen_lake_walker"]) < 0.85
    assert (run.folder / "out/curves.png").stat().st_size > 10_000
    assert len(list((run.folder / "out/frames").rglob("*.gif"))) == 4
