"""The command line on the fakes: exit codes, one line an error, and what check and plan print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy_runs import NOTE, NOTED, WARNING, Toy, only, turnwise

from turnwise import __version__
from turnwise.cli import main as cli
from turnwise.errors import CheckpointError, ConfigError, EngineError, MachineError, PluginError, TrainerError
from turnwise.testing.compare import says


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (PluginError("x"), 2),
        (MachineError("x"), 3),
        (TrainerError("x"), 1),
        (EngineError("x"), 1),
        (CheckpointError("x"), 1),
    ],
)
def test_exit_codes_follow_from_the_boundary_that_was_crossed(error: Any, code: int) -> None:
    assert cli.exit_code(error) == code


@pytest.mark.parametrize("command", ["train", "eval", "rollout", "plan", "check"])
def test_every_mistake_in_the_configuration_is_a_line_and_exit_code_2(toy: Toy, command: str) -> None:
    got = turnwise(command, toy(gama=0.9, max_steps="many"))
    assert got.exit_code == 2
    assert got.stdout == ""
    lines = got.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: ") for line in lines)
    assert "Did you mean 'gamma'?" in got.stderr


@pytest.mark.parametrize("command", ["train", "eval", "rollout", "plan", "check"])
def test_a_file_that_is_not_there_is_one_line(toy: Toy, command: str) -> None:
    toy()
    got = turnwise(command, "toi.yaml")
    assert (got.exit_code, got.stdout) == (2, "")
    assert got.stderr.startswith("error: toi.yaml: there is no such file.")
    assert got.stderr.count("\n") == 1


def test_debug_shows_where_an_error_comes_from(toy: Toy) -> None:
    got = turnwise("--debug", "plan", toy(gama=0.9))
    assert isinstance(got.exception, ConfigError)


def test_plan_takes_the_times_of_an_earlier_run(toy: Toy) -> None:
    path = toy(track_with=["jsonl"])
    assert turnwise("train", path).exit_code == 0
    values = json.loads(turnwise("plan", path, "max_steps=30", "--json", "--from", "out").stdout)
    assert values["time"]["total"] > 30 * values["time"]["step"] > 0
    assert "time  " in turnwise("plan", path, "--from", "out").stdout
    got = turnwise("plan", path, "--from", "nowhere")
    assert (got.exit_code, got.stderr.startswith("error: --from nowhere: ")) == (2, True)


def test_plan_needs_neither_the_environment_nor_every_plugin(toy: Toy) -> None:
    absent = {"Toy": {"env_type": "not_here", "env_manager": "fake", "env_config": {"any": 1}}}
    got = turnwise(
        "plan",
        toy(
            plugins=["turnwise.testing.plugin", "./players.py", "turnwise-zzz>=2"],
            custom_envs=absent,
        ),
    )
    assert got.exit_code == 0
    lines = got.stderr.splitlines()
    assert any(
        line.startswith("warning: ") and "pip install --find-links dist 'turnwise-zzz>=2'" in line for line in lines
    )
    assert any(line.startswith("warning: ") and "no environment is named 'not_here'" in line for line in lines)
    check = turnwise("check", toy(custom_envs=absent))
    assert check.exit_code == 2
    assert [line.partition(": ")[0] for line in check.stderr.splitlines() if not line.startswith("note: ")] == [
        "config"
    ]
    assert "no environment is named 'not_here'" in check.stderr
    broken = turnwise("plan", toy(plugins=["turnwise.testing.plugin", "./players.py", "./absent.py"]))
    assert (broken.exit_code, "the file './absent.py' does not exist" in broken.stderr) == (2, True)


def test_what_the_machine_lacks_is_exit_code_3(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = toy(output_dir="file/out")
    for command, prefix in (("train", "error"), ("check", "machine")):
        got = turnwise(command, path)
        assert got.exit_code == 3
        says(only(got.stderr.splitlines()), f"{prefix}: output_dir: ", f"{tmp_path / 'file'} is not a folder", "Fix: ")


def test_version_and_help_need_no_configuration() -> None:
    assert turnwise("--version").stdout == f"turnwise, version {__version__}\n"
    shown = turnwise("-h").stdout
    assert all(
        f"\n  {command} " in shown
        for command in ("train", "eval", "rollout", "plan", "check", "plugins", "new", "test-plugin")
    )
    assert turnwise("rollout").exit_code == 2


def test_the_plan_of_a_small_file_as_text_and_as_json(toy: Toy) -> None:
    got = turnwise("plan", toy(), "max_steps=5", "ppo_epochs=2")
    assert got.exit_code == 0
    assert "batch          2 groups × 2 = 4 trajectories a step\n" in got.stdout
    assert "updates        4 a step, 20 in 5 steps\n" in got.stdout
    assert "ROLL" not in got.stdout  # this file has no key of another framework
    assert got.stderr == ""
    field = turnwise("plan", toy(rpc_timeout=60))
    assert "note: loss_agg_mode = token-mean (ROLL's default is seq-mean-token-mean)\n" in field.stdout
    values = json.loads(turnwise("plan", toy(**NOTED, rpc_timeout=60), "--json", "max_steps=5").stdout)
    assert (values["updates"], values["trajectories"], values["evaluations"], values["evaluation_trajectories"]) == (
        [10, 10],
        20,
        3,
        9,
    )
    assert values["learning_rate"] == {"start": 5.0, "middle": 5.0, "end": 5.0}
    assert any(NOTE in note for note in values["notes"])
    assert values["notes"][-1].startswith("loss_agg_mode = token-mean")
    assert WARNING in values["warnings"][0]


def test_the_plan_warns_of_a_warm_up_without_effect(toy: Toy) -> None:
    got = turnwise("plan", toy(), "actor_train.training_args.warmup_steps=2")
    says(
        got.stdout.splitlines()[-1],
        "warning: warmup_steps = 2",
        "lr_scheduler_type constant",
        "Fix: constant_with_warmup",
    )


def test_check_sorts_its_findings_and_the_configuration_comes_first(toy: Toy, tmp_path: Path) -> None:
    path = toy()
    good = turnwise("check", path)
    assert (good.exit_code, good.stdout) == (0, f"{path}: ready to train\n")
    (tmp_path / "file").write_text("")
    got = turnwise("check", path, "output_dir=file", "actor_train.training_args.lr_scheduler_type=cosin")
    assert got.exit_code == 2
    config, machine = got.stderr.splitlines()
    place = (
        "override 'actor_train.training_args.lr_scheduler_type=cosin': $.actor_train.training_args.lr_scheduler_type"
    )
    assert config.startswith(f"config: {place}: 'cosin' is unknown. Did you mean 'cosine'?")
    says(machine, "machine: output_dir: ", f"{tmp_path / 'file'} is not a folder", "Fix: ")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["file", "players.py", "toy.yaml"]


def test_a_key_that_preflight_finds_at_fault_has_its_file_and_line(toy: Toy, tmp_path: Path) -> None:
    path = toy(
        actor_train={"strategy_args": {"strategy_name": "fake"}, "device_mapping": [0, 1]},
        runtime="local",
    )
    line = 1 + path.read_text().splitlines().index("  device_mapping:")
    for command, label in (("check", "config"), ("train", "error")):
        got = turnwise(command, path)
        assert got.exit_code == 2
        assert (
            f"{label}: {path}:{line}: $.actor_train.device_mapping: 2 devices are as many training processes"
            in got.stderr
        )
