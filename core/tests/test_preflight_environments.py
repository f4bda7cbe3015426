"""Environments before a run: one of each is built and closed, whatever its code does."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_runs import Toy, found, only, plugin

from turnwise.planning.preflight import Findings


def test_an_environment_that_cannot_be_built_is_reported_with_its_options(toy: Toy, tmp_path: Path) -> None:
    bad = "class Bad:\n    def __init__(self, size=1):\n        raise ValueError('size must be even')\n"
    bad += "@turnwise.hookimpl\ndef environments():\n    return [Implementation('bad', Bad)]\n"
    envs = {"Toy": {"env_type": "bad", "env_manager": "fake", "env_config": {"size": 3}}}
    line = only(found(toy(plugins=plugin(tmp_path, bad), custom_envs=envs)).config)
    assert line.startswith(
        "custom_envs.Toy: the environment 'bad' cannot be built with env_config {'size': 3}: ValueError: size must be"
        " even. Fix:"
    )


def environment(body: str) -> str:
    return f"class Bad:\n{body}@turnwise.hookimpl\ndef environments():\n    return [Implementation('bad', Bad)]\n"


@pytest.mark.parametrize(
    "close", ["def close(self):\n        raise RuntimeError('closed')\n", "async def close(self):\n        pass\n"]
)
def test_an_environment_that_cannot_be_closed_is_still_one_to_play(toy: Toy, tmp_path: Path, close: str) -> None:
    envs = {"Toy": {"env_type": "bad", "env_manager": "fake"}}
    assert found(toy(plugins=plugin(tmp_path, environment(f"    {close}")), custom_envs=envs)).config == []


def hanging(toy: Toy, tmp_path: Path, method: str) -> Findings:
    """What is found where this method of the environment takes a minute, and may take a fifth of a second."""
    body = environment(f"    {method}\n        import threading\n        threading.Event().wait(60)\n")
    return found(
        toy(
            plugins=plugin(tmp_path, body),
            custom_envs={"Toy": {"env_type": "bad", "env_manager": "fake"}},
            train_env_manager={"num_env_groups": 2, "group_size": 2, "tags": ["Toy"], "reset_timeout": 0.2},
            val_env_manager=None,
            eval_steps=0,
        )
    )


def test_an_environment_whose_constructor_hangs_is_reported_within_its_timeout(toy: Toy, tmp_path: Path) -> None:
    line = only(hanging(toy, tmp_path, "def __init__(self):").config)
    assert line.startswith("custom_envs.Toy: the environment 'bad' was not built within reset_timeout = 0.2 s. Fix:")


def test_an_environment_whose_close_hangs_holds_nothing_up(
    toy: Toy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    findings = hanging(toy, tmp_path, "def close(self):")
    assert findings.config == []
    assert "Toy.close did not end within 0.2 s" in caplog.text


def test_an_environment_whose_constructor_exits_is_reported_and_ends_nothing(toy: Toy, tmp_path: Path) -> None:
    envs = {"Toy": {"env_type": "bad", "env_manager": "fake"}}
    body = "    def __init__(self):\n        raise SystemExit(0)\n"
    line = only(found(toy(plugins=plugin(tmp_path, environment(body)), custom_envs=envs)).config)
    assert line.startswith(
        "custom_envs.Toy: the environment 'bad' cannot be built with env_config {}: SystemExit: 0. Fix:"
    )


def test_what_an_environment_says_that_the_machine_lacks_is_the_machine_s(toy: Toy, tmp_path: Path) -> None:
    envs = {"Toy": {"env_type": "bad", "env_manager": "fake"}}
    body = "    def __init__(self):\n        from turnwise.errors import MachineError\n"
    body += "        raise MachineError('bad needs a piano, not found. Fix: buy one')\n"
    findings = found(toy(plugins=plugin(tmp_path, environment(body)), custom_envs=envs))
    assert findings.config == []
    assert "custom_envs.Toy: bad needs a piano, not found. Fix: buy one" in findings.machine


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise FileNotFoundError('rows.jsonl')", "FileNotFoundError: rows.jsonl"),
        ("return self.rows", "AttributeError: 'Bad' object has no attribute 'rows'"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_an_environment_whose_number_of_tasks_raises_is_reported(
    toy: Toy, tmp_path: Path, body: str, says: str
) -> None:
    property_ = f"    @property\n    def num_tasks(self):\n        {body}\n"
    envs = {"Toy": {"env_type": "bad", "env_manager": "fake"}}
    line = only(found(toy(plugins=plugin(tmp_path, environment(property_)), custom_envs=envs)).config)
    assert line.startswith(f"custom_envs.Toy: num_tasks of the environment 'bad' raised {says}. Fix:")


@pytest.mark.parametrize("count", ["'12'", "0", "-3", "2.0", "True"])
def test_a_number_of_tasks_that_counts_nothing_is_reported(toy: Toy, tmp_path: Path, count: str) -> None:
    envs = {"Toy": {"env_type": "bad", "env_manager": "fake"}}
    body = environment(f"    num_tasks = {count}\n")
    line = only(found(toy(plugins=plugin(tmp_path, body), custom_envs=envs)).config)
    assert line.startswith(f"custom_envs.Toy: num_tasks of the environment 'bad' is {count}, no number of tasks. Fix:")


@pytest.mark.parametrize("count", ["None", "__import__('numpy').int64(3)"])
def test_a_number_of_tasks_may_be_numpy_s_or_absent(toy: Toy, tmp_path: Path, count: str) -> None:
    envs = {"Toy": {"env_type": "bad", "env_manager": "fake"}}
    assert (
        found(toy(plugins=plugin(tmp_path, environment(f"    num_tasks = {count}\n")), custom_envs=envs)).config == []
    )


def test_a_number_of_tasks_that_is_never_known_is_reported_within_its_timeout(toy: Toy, tmp_path: Path) -> None:
    line = only(hanging(toy, tmp_path, "@property\n    def num_tasks(self):").config)
    assert line.startswith(
        "custom_envs.Toy: num_tasks of the environment 'bad' was not read within reset_timeout = 0.2 s. Fix:"
    )
