"""The report: before, after and baselines in one table, advice on what is not healthy, and where the model is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.config.schema import EnvManagerConfig, RunConfig
from turnwise.pipeline import report
from turnwise.pipeline.metrics import HEALTHY
from turnwise.pipeline.report import History, unhealthy

CONFIG = RunConfig(max_steps=9, rollout_batch_size=1, pretrain="m", train_env_manager=EnvManagerConfig(), custom_envs={}, exp_name="lake")


def evaluation(success: float, score: float) -> dict[str, float]:
    return {"val/Lake/success": success, "val/Lake/score/mean": score, "val/Lake/failed": 0.0, "val/success": success, "val/Lake/odd": 1.0}


def test_the_table_holds_first_last_and_baselines(tmp_path: Path) -> None:
    history = History({0: evaluation(0.1, -0.25), 5: evaluation(0.4, 0.0), 9: evaluation(0.75, 0.5)})
    history.baselines["random"] = evaluation(0.19, -0.1)
    history.baselines["shy"] = {"val/Lake/score/mean": 0.0}
    text = report.write(tmp_path, CONFIG, history, tmp_path / "checkpoint-000009")
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == text
    blocks = text.split("\n\n")
    assert blocks[0] == "# lake: 9 steps"
    assert blocks[1].splitlines() == [
        "| player | Lake/success | Lake/score/mean |",
        "|---|---:|---:|",
        "| model at step 0 | 0.100 | -0.250 |",
        "| model at step 9 | 0.750 | 0.500 |",
        "| random | 0.190 | -0.100 |",
        "| shy | – | 0.000 |",
    ]
    assert blocks[2] == f"Checkpoint: {tmp_path / 'checkpoint-000009'} (a Hugging Face folder: {tmp_path / 'checkpoint-000009' / 'model'})\n"


def test_one_evaluation_is_one_row_and_none_no_table(tmp_path: Path) -> None:
    one = report.write(tmp_path, CONFIG, History({0: evaluation(0.1, 0.2)}), None)
    assert one.count("model at step") == 1
    assert report.write(tmp_path, CONFIG, History(), None) == "# lake: 9 steps\n"


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"policy/approx_kl": 0.049, "policy/clip_frac": 0.3, "policy/entropy": 0.1}, []),
        ({"policy/approx_kl": 0.051, "policy/clip_frac": 0.31, "policy/entropy": 0.09}, ["policy/approx_kl", "policy/clip_frac", "policy/entropy"]),
        ({"policy/entropy": float("nan")}, ["policy/entropy"]),
        ({"policy/learning_rate": 0.0}, ["policy/learning_rate"]),
        ({"policy/learning_rate": 1e-12}, []),
        ({}, []),
    ],
)
def test_metrics_outside_their_healthy_range_get_a_line_of_advice(values: dict[str, float], names: list[str], tmp_path: Path) -> None:
    assert [line.split(" = ")[0] for line in unhealthy(values)] == names
    text = report.write(tmp_path, CONFIG, History(last=values), None)
    assert ("Outside their healthy range at the end:\n- " in text) == bool(names)


def test_advice_names_its_section_of_the_documentation() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert set(report.SECTIONS) == set(HEALTHY)
    for name, section in report.SECTIONS.items():
        assert f"\n## {section}\n" in page
        assert unhealthy({name: float("nan")})[0].endswith(f"(docs/troubleshooting.md: {section})")


def test_the_history_travels_through_json() -> None:
    history = History({0: evaluation(0.1, 0.2), 10: {"val/x": 1.0}}, {"random": {"val/x": 2.0}}, {"policy/loss": 0.5})
    assert History.from_plain(json.loads(json.dumps(history.to_plain()))) == history
    assert History.from_plain(History().to_plain()) == History()
