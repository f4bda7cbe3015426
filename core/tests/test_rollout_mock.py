"""`rollout_mock` on the fakes: a dump trained twice gives the same metrics, nothing is played, and what does not fit is
told in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from turnwise.cli.main import main
from turnwise.config import load
from turnwise.errors import ConfigError, EngineError
from turnwise.rollout import mock
from turnwise.testing.fakes import FakeEnvironment

Toy = Callable[..., Path]
PLAIN: dict[str, Any] = {"track_with": ["jsonl"], "eval_steps": 0, "val_env_manager": None}
TIMED = ("time/", "tps/", "system/")


def turnwise(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def train(toy: Toy, name: str, mode: str, **changes: Any) -> list[dict[str, float]]:
    """The metrics of a run in `mode`, without those of the clock."""
    path = toy(**PLAIN, output_dir=name, rollout_mock={"enable": True, "mode": mode, "dump_dir": "dump"}, **changes)
    done = turnwise("train", path)
    assert done.exit_code == 0, done.output
    lines = (Path(name) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMED)} for line in lines]


def test_the_same_dump_trained_twice_gives_the_same_metrics_as_each_other_and_as_the_run_that_wrote_it(
    toy: Toy,
) -> None:
    played = train(toy, "played", "dump")
    assert sorted(p.name for p in Path("dump").iterdir()) == [f"rollouts-{step:06d}.npz" for step in range(3)]
    first, second = train(toy, "first", "mock"), train(toy, "second", "mock")
    assert first == second
    assert len(first) == 3
    assert first == played


def test_nothing_is_played(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    train(toy, "played", "dump")

    def forbidden(*args: Any, **more: Any) -> Any:
        raise AssertionError("an environment was reset")

    monkeypatch.setattr(FakeEnvironment, "reset", forbidden)
    assert len(train(toy, "again", "mock")) == 3


def test_other_settings_of_training_are_tried_on_the_same_rollouts(toy: Toy) -> None:
    train(toy, "played", "dump")
    role = {
        "training_args": {"learning_rate": 0.5, "per_device_train_batch_size": 2},
        "strategy_args": {"strategy_name": "fake"},
    }
    slow = train(toy, "slow", "mock", actor_train=role)
    fast = train(toy, "fast", "mock")
    assert [line["critic/score/mean"] for line in slow] == [line["critic/score/mean"] for line in fast]
    assert slow != fast


def test_the_dumped_log_probs_are_not_taken_for_the_trainer_s_own(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    train(toy, "played", "dump")

    def told(self: Any, config: Any, *, shared: bool) -> None:
        raise EngineError(f"shared is {shared}")

    monkeypatch.setattr("turnwise.planning.transport.choose", lambda config: "shared")
    monkeypatch.setattr("turnwise.pipeline.learner.OldLogProbs.__init__", told)
    for mode, shared in (("dump", True), ("mock", False)):
        block = {"enable": True, "mode": mode, "dump_dir": "dump"}
        assert (
            f"shared is {shared}" in turnwise("train", toy(**PLAIN, output_dir=f"{mode}-2", rollout_mock=block)).output
        )


def test_a_step_that_was_not_dumped_is_told_before_the_start(toy: Toy) -> None:
    train(toy, "played", "dump")
    block = {"enable": True, "mode": "mock", "dump_dir": "dump"}
    told = turnwise("check", toy(**PLAIN, rollout_mock=block, max_steps=5))
    assert told.exit_code == 2
    assert "$.rollout_mock.dump_dir: dump holds no rollouts of step 3, max_steps is 5. Fix: max_steps: 3" in told.output
    nothing = turnwise("train", toy(**PLAIN, rollout_mock={**block, "dump_dir": "nowhere"}))
    assert nothing.exit_code == 2
    assert "nowhere holds no rollouts of step 0, max_steps is 3. Fix: dump them first" in nothing.output


def test_a_dump_of_another_batch_or_a_damaged_one_ends_the_run_in_one_line(toy: Toy) -> None:
    train(toy, "played", "dump")
    block = {"enable": True, "mode": "mock", "dump_dir": "dump"}
    manager = {"num_env_groups": 1, "group_size": 4, "tags": ["Toy"]}
    other = turnwise("train", toy(**PLAIN, output_dir="other", rollout_mock=block, train_env_manager=manager))
    assert other.exit_code == 2
    assert (
        "was dumped with {'rollout_batch_size': 4, 'group_size': 2}, this run has {'rollout_batch_size': 4,"
        " 'group_size': 4}" in other.output
    )
    config = load(toy(**PLAIN, rollout_mock=block)).config
    file = mock.file_of(config, 1)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read"):
        mock.read(config, 1)


def test_a_dump_with_any_damage_is_read_or_refused(toy: Toy) -> None:
    train(toy, "played", "dump")
    config = load(toy(**PLAIN, rollout_mock={"enable": True, "mode": "mock", "dump_dir": "dump"})).config
    file = mock.file_of(config, 1)
    whole = file.read_bytes()
    refused = 0
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
        try:
            mock.read(config, 1)
        except ConfigError:
            refused += 1
    assert refused > len(whole) / 14


def test_evaluation_is_still_played(toy: Toy) -> None:
    path = toy(rollout_mock={"enable": True, "mode": "dump", "dump_dir": "dump"}, track_with=["jsonl"])
    assert turnwise("train", path).exit_code == 0
    path = toy(
        rollout_mock={"enable": True, "mode": "mock", "dump_dir": "dump"}, track_with=["jsonl"], output_dir="again"
    )
    assert turnwise("train", path).exit_code == 0
    last = (Path("again") / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    assert "val/Toy/score/mean" in last
