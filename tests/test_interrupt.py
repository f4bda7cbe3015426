"""Ctrl-C stops at the next safe point, saves, says how to go on, and what goes on ends as if nothing had happened."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

ROLLOUT = "turnwise.rollout:Scheduler.next_batch"
UPDATE = "turnwise_torch.strategy:TorchStrategy.update"
FAKE_UPDATE = "turnwise.testing.fake_model:FakeStrategy.update"
EVALUATION = "turnwise.rollout:Scheduler.evaluate"


def interrupted(run: Any, ended: subprocess.CompletedProcess[str], done: int) -> list[str]:
    """The arguments of the command that the interrupted run says to go on with."""
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("note: ")]
    assert lines[0] == "WARNING: stopping at the next safe point and saving; once more stops at once"
    assert lines[1] == f"stopped after {done} of 6 steps; saved out/checkpoints/checkpoint-{done:06d}"
    assert lines[2] == f"saved: out/checkpoints/checkpoint-{done:06d}"
    assert len(lines) == 4
    assert run.checkpoints()[-1] == done
    return shlex.split(lines[3].removeprefix("resume: "))[1:]


@pytest.mark.parametrize(("place", "nth", "done"), [(ROLLOUT, 5, 3), (UPDATE, 7, 4)])
def test_interrupted_and_resumed_is_as_if_it_had_not_been(
    lake: Any, whole_lake: Any, place: str, nth: int, done: int
) -> None:
    # The recipe's tokenizer is trained on a rollout of its own, which is the first call.
    again = interrupted(lake, lake.process("train", "run.yaml", at=(place, nth, "interrupt")), done)
    assert lake.command(*again).exit_code == 0
    lake.same(whole_lake)


@pytest.mark.parametrize(
    ("place", "nth", "done"),
    [
        ("turnwise.testing.fake_model:FakeModelSource.prepare", 1, 0),  # before the first step
        (ROLLOUT, 1, 0),
        (FAKE_UPDATE, 4, 2),  # while the step trains that a checkpoint follows anyway
        (FAKE_UPDATE, 12, 6),  # in the last step: all that is left is the last evaluation
        (EVALUATION, 1, 0),
        (EVALUATION, 2, 3),
        (EVALUATION, 3, 6),
        ("turnwise.pipeline.checkpoint:_make_durable", 1, 2),  # while it saves
    ],
)
def test_interrupted_anywhere_and_resumed(fake: Any, whole_fake: Any, place: str, nth: int, done: int) -> None:
    again = interrupted(fake, fake.process("train", "run.yaml", at=(place, nth, "interrupt")), done)
    assert fake.command(*again).exit_code == 0
    fake.same(whole_fake)


def test_an_interrupt_while_a_recipe_s_tokenizer_is_made_is_heard_before_the_episodes_end(lake: Any) -> None:
    slow = ["custom_envs.Lake.step=thread", "max_steps=6"]
    at = ("turnwise_gymnasium.frozen_lake:FrozenLake.reset", 3, "interrupt-and-wait")
    ended = lake.process("train", "run.yaml", *slow, at=at, timeout=60)
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.splitlines()[-3:] == [
        "WARNING: stopping at the next safe point and saving; once more stops at once",
        "stopped while random episodes were played for the recipe's tokenizer, before any step",
        "saved: nothing yet",
    ]
    assert "note: playing 64 random episodes of Lake: the recipe's tokenizer learns from them" in ended.stderr
    assert lake.train().exit_code == 0


@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_an_interrupt_of_a_rollout_while_a_recipe_s_tokenizer_is_made_is_heard(lake: Any, command: str) -> None:
    at = ("turnwise_gymnasium.frozen_lake:FrozenLake.reset", 3, "interrupt-and-wait")
    ended = lake.process(command, "run.yaml", "custom_envs.Lake.step=thread", at=at, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "note: playing 64 random episodes of Lake: the recipe's tokenizer learns from them",
        "",
        "Aborted!",
    ]


def test_the_command_to_resume_keeps_overrides_that_a_shell_would_break(fake: Any, whole_fake: Any) -> None:
    overrides = [
        "custom_envs.Count.env_config={target: a, length: 3}",
        "vars.pattern='<answer>(.*?)</answer>'",
        "resume_from_checkpoint=false",
    ]
    ended = fake.process("train", "run.yaml", *overrides, at=(ROLLOUT, 4, "interrupt"))
    again = interrupted(fake, ended, 3)
    assert again == ["train", "run.yaml", *overrides[:2], "resume_from_checkpoint=true"]
    assert fake.command(*again).exit_code == 0
    fake.same(whole_fake)


def test_a_run_that_was_resumed_elsewhere_and_interrupted_at_once_names_that_checkpoint(
    fake: Any, whole_fake: Any
) -> None:
    source = f"{whole_fake.folder}/out/checkpoints/checkpoint-000004"
    ended = fake.process("train", "run.yaml", f"resume_from_checkpoint={source}", at=(ROLLOUT, 1, "interrupt"))
    assert ended.returncode == 130
    assert ended.stderr.splitlines()[-1].endswith(f"turnwise train run.yaml resume_from_checkpoint={source}")


def test_sigterm_is_a_request_to_stop_too(fake: Any) -> None:
    slow = "actor_infer.strategy_args.strategy_config={delay: 0.2}"
    command = [sys.executable, "-m", "turnwise.cli.main", "train", "run.yaml", slow]
    running = subprocess.Popen(command, cwd=fake.folder, env=os.environ, stderr=subprocess.PIPE, text=True)
    metrics = fake.folder / "out/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 1):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.send_signal(signal.SIGTERM)
    _, stderr = running.communicate(timeout=30)
    assert running.returncode == 130
    assert f"saved: out/checkpoints/checkpoint-{fake.checkpoints()[-1]:06d}" in stderr


def test_a_second_interrupt_ends_a_run_whose_inline_step_hangs(fake: Any, whole_fake: Any) -> None:
    began = time.monotonic()
    ended = fake.process(
        "train", "run.yaml", at=("turnwise.testing.fakes:FakeEnvironment.step", 60, "interrupt-twice"), timeout=50
    )
    assert time.monotonic() - began < 30
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
    assert "stopped at once" in ended.stderr
    fake.train("resume_from_checkpoint=true")
    fake.same(whole_fake)


@pytest.mark.parametrize("place", [FAKE_UPDATE, ROLLOUT])
def test_a_second_interrupt_ends_the_run_at_once(fake: Any, whole_fake: Any, place: str) -> None:
    """Even while an update goes on that would take a minute."""
    began = time.monotonic()
    nth = 8 if place == FAKE_UPDATE else 4
    action = "interrupt-twice" if place == FAKE_UPDATE else "interrupt"
    ended = fake.process("train", "run.yaml", at=(place, nth, action), timeout=50)
    assert ended.returncode == 130
    assert time.monotonic() - began < 30
    assert "Traceback" not in ended.stderr
    if place == FAKE_UPDATE:
        assert "stopped at once" in ended.stderr
        assert "saved: out/checkpoints/checkpoint-000002" in ended.stderr
    fake.train("resume_from_checkpoint=true")
    fake.same(whole_fake)
