"""The chart logger draws what its panels name and goes on after a resume."""

import json
from pathlib import Path

from turnwise.contracts.logger import LoggerContext
from turnwise_chart.config import ChartConfig
from turnwise_chart.logger import ChartLogger


def make(folder: Path) -> ChartLogger:
    return ChartLogger(ChartConfig(), LoggerContext(folder=folder, exp_name="t"))


def test_a_picture_is_written_with_the_named_metrics_only(tmp_path: Path) -> None:
    logger = make(tmp_path)
    for step in range(5):
        logger.scalars(
            step,
            {"critic/score/mean": step / 4, "env/Lake/success": 0.5, "time/step": 1.0, "policy/entropy": float("nan")},
        )
    logger.close()
    logger.close()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(json.loads((tmp_path / "curves.json").read_text())) == ["critic/score/mean", "env/Lake/success"]


def test_resume_keeps_earlier_points_and_drops_later_ones(tmp_path: Path) -> None:
    first = make(tmp_path)
    for step in range(5):
        first.scalars(step, {"policy/entropy": 1.0 - step / 10})
    first.close()
    second = make(tmp_path)
    second.resume(3)
    second.scalars(3, {"policy/entropy": 0.0})
    second.close()
    assert json.loads((tmp_path / "curves.json").read_text()) == {
        "policy/entropy": [[0, 1.0], [1, 0.9], [2, 0.8], [3, 0.0]]
    }


def test_a_new_run_in_an_old_folder_starts_without_the_old_points(tmp_path: Path) -> None:
    old = make(tmp_path)
    old.scalars(0, {"policy/entropy": 1.0})
    old.close()
    new = make(tmp_path)
    new.resume(0)
    new.scalars(0, {"policy/entropy": 2.0})
    new.close()
    assert json.loads((tmp_path / "curves.json").read_text()) == {"policy/entropy": [[0, 2.0]]}
