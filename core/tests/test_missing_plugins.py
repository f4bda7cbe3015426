"""What the commands say where plugins are missing or two answer to one name: distributions, the command that installs
them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from turnwise.cli.main import main

Toy = Callable[..., Path]
INSTALL = "pip install --find-links dist 'turnwise-zzz>=2' (dist: from `make wheels` in Turnwise's repository)"
ABSENT = ["turnwise.testing.plugin", "./players.py", "turnwise-zzz>=2"]
SECOND = """
import turnwise
from turnwise import Implementation

class Game:
    def __init__(self) -> None: ...

@turnwise.hookimpl
def environments():
    return [Implementation("fake_env", Game)]
"""


def turnwise(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.mark.parametrize("command", ["train", "check", "eval", "rollout"])
def test_missing_distributions_are_named_with_the_command_that_installs_them(toy: Toy, command: str) -> None:
    got = turnwise(command, toy(plugins=ABSENT))
    assert got.exit_code == 2
    assert f"'turnwise-zzz' is not installed. Fix: {INSTALL}\n" in got.stderr


def test_a_plan_that_lacks_what_it_counts_with_names_the_distributions(toy: Toy) -> None:
    absent = {"Toy": {"env_type": "not_here", "env_manager": "fake"}}
    path = toy(plugins=ABSENT, track_with=["somewhere", "none_either", "jsonl", "jsonl"], custom_envs=absent)
    got = turnwise("plan", path)
    lines = got.stderr.splitlines()
    assert got.exit_code == 2
    assert [line for line in lines if "$.plugins: 'turnwise-zzz' is not installed" in line and line.endswith(INSTALL)]
    assert [line for line in lines if "$.custom_envs.Toy.env_type: no environment is named 'not_here'" in line]
    assert [line.partition("$.track_with")[2][:38] for line in lines if "error: " in line and "track_with" in line] == [
        "[0]: no logger is named 'somewhere'. I",
        "[1]: no logger is named 'none_either'.",
        "[3]: 'jsonl' is named twice. Fix: keep",
    ]


def test_what_no_plugin_brings_is_reported_with_the_mistakes(toy: Toy) -> None:
    got = turnwise("check", toy(custom_envs={"Toy": {"env_type": "not_here", "env_manager": "fake"}}, gama=0.9))
    assert got.exit_code == 2
    assert [line.split(": ")[0] for line in got.stderr.splitlines()] == ["error", "error"]
    assert "no environment is named 'not_here'" in got.stderr


@pytest.mark.parametrize("command", ["plan", "check", "train"])
def test_two_plugins_of_one_name_are_a_mistake_and_nothing_that_the_machine_lacks(
    toy: Toy, tmp_path: Path, command: str
) -> None:
    (tmp_path / "second.py").write_text(SECOND, encoding="utf-8")
    tag = {"env_type": "fake_env", "env_manager": "fake"}
    got = turnwise(
        command, toy(plugins=["turnwise.testing.plugin", "./players.py", "./second.py"], custom_envs={"Toy": tag})
    )
    assert got.exit_code == 2
    (line,) = got.stderr.splitlines()
    assert line.startswith("error: ")
    assert "environment 'fake_env' is provided twice: by ./second.py and turnwise.testing.plugin. Fix: " in line


def test_a_constant_rate_has_no_warm_up(toy: Toy) -> None:
    def plan(schedule: str) -> str:
        arguments = {"per_device_train_batch_size": 2, "warmup_steps": 3, "lr_scheduler_type": schedule}
        fake = {"strategy_args": {"strategy_name": "fake_strategy"}, "training_args": arguments}
        return turnwise("plan", toy(actor_train=fake)).stdout

    assert "warm-up        3 pipeline steps" in plan("constant_with_warmup")
    assert "warm-up" not in plan("constant")
    assert "warmup_steps = 3 has no effect with lr_scheduler_type constant" in plan("constant")
