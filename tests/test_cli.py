"""The commands from end to end: what one sees of a run before, during and after it, with the fakes and with the real
plugins."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image

WITH_FILE = "plugins=[turnwise.testing.plugin, ./mine.py]"
STOPS = """\
from turnwise import Implementation, hookimpl
from turnwise.testing.fakes import FakeEnvironment

class Stops(FakeEnvironment):
    def step(self, action):
        if self._turn == 1:
            breakpoint()
        return super().step(action)

@hookimpl
def environments():
    return [Implementation("stops", Stops)]
"""


ASKS = """\
import os
from turnwise import Implementation, hookimpl
from turnwise.testing.fakes import FakeBackend

class Asks(FakeBackend):
    def __init__(self, config, context):
        super().__init__(config, context)
        print("the role's variable is", os.environ.get("OF_THE_ROLE"))

@hookimpl
def inference_backends():
    return [Implementation("asks", Asks, config="turnwise.testing.fakes:FakeBackendConfig")]
"""


def test_train_reports_what_became_of_the_model_and_how_to_watch_it(fake: Any) -> None:
    result = fake.train("custom_envs.Count.env_config={length: 3}")
    assert "| model at step 0 |" in result.stdout
    assert "| model at step 6 |" in result.stdout
    (watch,) = [line for line in result.stdout.splitlines() if line.startswith("watch it play: ")]
    words = shlex.split(watch.removeprefix("watch it play: "))[1:]
    assert words[-4:] == ["--model", "latest", "--episodes", "3"]
    watched = fake.command(*words)
    assert watched.exit_code == 0, watched.output
    assert watched.stdout.count("=== Count, task ") == 3


@pytest.mark.parametrize("which", ["fake", "lake"])
def test_evaluating_the_latest_model_repeats_the_runs_last_evaluation(
    which: str, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(f"whole_{which}")
    last = {name: value for name, value in run.metrics()[-1].items() if name.startswith("val/")}
    result = run.command("eval", "run.yaml", "--model", "latest", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == last
    assert any(value for name, value in last.items() if name.endswith("turns/mean"))


def test_evaluating_without_a_name_takes_the_model_to_begin_with(whole_fake: Any) -> None:
    first = {name: value for name, value in whole_fake.metrics()[0].items() if name.startswith("val/")}
    result = whole_fake.command("eval", "run.yaml", "--json")
    assert json.loads(result.stdout) == first
    named = whole_fake.command("eval", "run.yaml", "--model", "out/checkpoints/checkpoint-000004", "--json")
    assert json.loads(named.stdout) != first
    plain = whole_fake.command("eval", "run.yaml", "--episodes", "2")
    assert plain.exit_code == 0
    assert "val/Count/score/mean" in plain.stdout


def test_a_player_can_be_evaluated_and_watched(lake: Any) -> None:
    result = lake.command("eval", "run.yaml", "--player", "random", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["val/Lake/invalid"] == 0  # it plays legal actions
    again = lake.command("eval", "run.yaml", "--player", "random", "--json")
    assert json.loads(again.stdout) == values
    played = lake.command("rollout", "run.yaml", "--player", "random", "--episodes", "2")
    assert played.stdout.count("=== Lake, task ") == 2
    assert "The goal is " in played.stdout
    assert not (lake.folder / "out").exists()  # nothing but a look


def test_rollout_prints_an_episode_turn_by_turn(whole_fake: Any) -> None:
    result = whole_fake.command("rollout", "run.yaml", "--model", "latest", "--seed", "5")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "=== Count, task 0, member 0"
    assert [line for line in lines if line.startswith("--- ")] == ["--- turn 0", "--- turn 1", "--- turn 2", "--- end"]
    assert sum(line.startswith("reward ") for line in lines) == 3
    other = whole_fake.command("rollout", "run.yaml", "--model", "latest", "--seed", "6")
    assert other.stdout != result.stdout


@pytest.mark.parametrize("arguments", [[], ["--player", "random"]])
def test_frames_become_a_gif_or_pictures(whole_lake: Any, arguments: list[str]) -> None:
    result = whole_lake.command("rollout", "run.yaml", *arguments, "--render", "frames")
    assert result.exit_code == 0, result.output
    (gif,) = (whole_lake.folder / "frames").glob("*.gif")
    assert f"wrote frames/{gif.name}" in result.stdout
    with Image.open(gif) as picture:
        assert picture.n_frames >= (2 if arguments else 1)  # equal frames are one: the untrained model stands still
        assert min(picture.size) >= 64
    still = whole_lake.command("rollout", "run.yaml", *arguments, "--render", "stills", "--still")
    assert still.exit_code == 0, still.output
    turns = still.stdout.count("--- turn ")
    pictures = sorted((whole_lake.folder / "stills").glob("*.png"))
    assert len(pictures) == turns + 1
    with Image.open(pictures[0]) as first, Image.open(pictures[-1]) as last:
        assert first.size == last.size
        assert np.asarray(first).std() > 0
    for file in (gif, *pictures):
        file.unlink()


def test_a_run_writes_frames_of_the_evaluated_episodes(fake: Any) -> None:
    fake.train("max_steps=1", "eval_steps=1", "render_save_dir=frames", "render_episodes=1")
    assert sorted(p.name for p in (fake.folder / "frames").iterdir()) == ["step-000000", "step-000001"]
    assert [p.suffix for p in (fake.folder / "frames/step-000001").iterdir()] == [".gif"]


def test_a_run_dumps_the_trajectories_of_every_step_and_logs_where_its_key_says(fake: Any) -> None:
    fake.train("max_steps=2", "eval_steps=0", "rollout_dump_dir=dump", "logging_dir=logs")
    files = sorted((fake.folder / "dump").iterdir())
    assert [p.name for p in files] == ["step-000000.jsonl", "step-000001.jsonl"]
    for step, file in enumerate(files):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(records) == 8
        assert {record["step"] for record in records} == {step}
    assert (fake.folder / "logs/run.log").is_file()
    assert not (fake.folder / "out/run.log").exists()


def test_a_role_finds_its_environment_variables(fake: Any) -> None:
    """In a process of its own: in `eval` they stay until it ends."""
    (fake.folder / "mine.py").write_text(ASKS)
    named = [WITH_FILE, "actor_infer.strategy_args.strategy_name=asks", "actor_infer.system_envs={OF_THE_ROLE: 7}"]
    for command in (
        ["train", "run.yaml", *named, "max_steps=1", "eval_steps=0"],
        ["eval", "run.yaml", *named, "--episodes", "1"],
    ):
        ended = fake.process(*command)
        assert ended.returncode == 0, ended.stderr
        assert "the role's variable is 7" in ended.stdout


def test_breakpoint_in_an_environment_opens_the_debugger(fake: Any) -> None:
    """A session of pdb at the keyboard, in the main thread, longer than every timeout."""
    (fake.folder / "mine.py").write_text(STOPS)
    overrides = [
        WITH_FILE,
        "custom_envs.Count.env_type=stops",
        "custom_envs.Count.step=thread",
        "val_env_manager.step_timeout=0.2",
    ]
    typed = (
        "import threading, time\n"
        "print('in the main thread:', threading.current_thread() is threading.main_thread())\n"
        "print('the turn is', self._turn)\n"
        "time.sleep(0.6)\n"
        "c\n"
    )
    command = [sys.executable, "-m", "turnwise.cli.main", "rollout", "run.yaml", *overrides, "--debug"]
    ended = subprocess.run(
        command, cwd=fake.folder, env=os.environ, input=typed, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert "in the main thread: True" in ended.stdout
    assert "the turn is 1" in ended.stdout
    assert "stopped by terminated" in ended.stdout


def test_a_person_can_play(fake: Any) -> None:
    result = fake.command("rollout", "run.yaml", "--player", "human", input="a\nb\na\n")
    assert result.exit_code == 0, result.output
    assert "score 2, stopped by terminated, success" in result.stdout
    assert result.stdout.count("actions: a, b") == 3


def test_a_person_can_leave(fake: Any) -> None:
    result = fake.command("rollout", "run.yaml", "--player", "human", input="a\nq\n")
    assert result.exit_code == 1
    # Standard error is the whole process's: what threads of earlier tests still log may stand beside the line.
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors == ["error: the human player left the game"]
    assert "Traceback" not in result.stderr


def test_plan_and_check_start_nothing(lake: Any) -> None:
    plan = lake.command("plan", "run.yaml", "--json")
    assert plan.exit_code == 0, plan.output
    values = json.loads(plan.stdout)
    assert values["warnings"] == []
    assert lake.command("plan", "run.yaml").exit_code == 0
    check = lake.command("check", "run.yaml")
    assert check.exit_code == 0, check.output
    assert check.stdout == "run.yaml: ready to train\n"
    assert [p.name for p in lake.folder.iterdir()] == ["run.yaml"]


def test_check_reports_the_configuration_and_the_machine_apart(fake: Any) -> None:
    both = fake.command(
        "check", "run.yaml", "actor_infer.device_mapping=[0, 1, 2, 3, 4, 5, 6, 7]", "output_dir=/proc/turnwise/out"
    )
    assert both.exit_code == 3
    assert "machine: actor_infer: device_mapping needs 8 GPUs, found " in both.stderr
    assert "machine: output_dir: " in both.stderr
    config = fake.command("check", "run.yaml", "resume_from_checkpoint=nowhere")
    assert config.exit_code == 2
    assert config.stderr.startswith(
        "config: override 'resume_from_checkpoint=nowhere': $.resume_from_checkpoint: nowhere is not a checkpoint"
    )


def test_a_model_that_is_not_there_is_one_line(fake: Any) -> None:
    latest = fake.command("eval", "run.yaml", "--model", "latest")
    assert latest.exit_code == 1
    assert latest.stderr == "error: out/checkpoints holds no checkpoint. Fix: train first, or name a model folder.\n"
    named = fake.command("rollout", "run.yaml", "--model", "nowhere")
    assert named.exit_code == 2
    assert len(named.stderr.splitlines()) == 1
    player = fake.command("rollout", "run.yaml", "--player", "humann")
    assert player.exit_code == 2
    assert "Did you mean 'human'?" in player.stderr
    tag = fake.command("eval", "run.yaml", "--tag", "Cuont")
    assert tag.exit_code == 2
    assert len(tag.stderr.splitlines()) == 1
