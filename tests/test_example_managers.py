"""The managers in examples/: they keep the contract, are short, and train on a CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from turnwise.cli.main import main
from turnwise.testing.kit import run_conformance

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "managers"
SMALL = [
    "max_steps=3",
    "eval_steps=3",
    "rollout_batch_size=16",
    "train_env_manager.num_env_groups=4",
    "train_env_manager.group_size=4",
    "val_env_manager.num_env_groups=4",
    "actor_train.training_args.per_device_train_batch_size=8",
    "output_dir=run",
]


@pytest.mark.parametrize("name", ["reflect", "duel"])
def test_it_keeps_the_contract(name: str) -> None:
    assert run_conformance(str(EXAMPLES / f"{name}.py"), strict=True) == 0


def test_the_reflecting_manager_is_sixty_lines() -> None:
    assert len((EXAMPLES / "reflect.py").read_text(encoding="utf-8").splitlines()) <= 60


def trained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    for path in EXAMPLES.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["train", f"{name}.yaml", *SMALL])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_reflection_trains_both_calls_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = trained("reflect", tmp_path, monkeypatch)
    for line in lines[:3]:
        assert line["policy/grad_norm"] > 0
        assert line["rollout/env_failures"] == 0
        assert line["rollout/turns"] % 2 == 0  # a draft to every answer
        assert line["rollout/samples"] == 16


def test_self_play_trains_both_roles_and_is_judged_against_another_player(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = trained("duel", tmp_path, monkeypatch)
    for line in lines[:3]:
        assert line["policy/grad_norm"] > 0
        assert line["rollout/episodes"] == 16
        assert -1 <= line["env/Nim/first/score/mean"] <= 1
    assert lines[0]["val/NimAgainstChance/turns/mean"] >= 1
    assert "val/NimAgainstChance/second/score/mean" not in lines[0]
