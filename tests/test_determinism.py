"""The same seed gives the same run, to the last bit: twice, whatever thread the environments step in, killed and
resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TRAJECTORY = "custom_envs.Lake.env_manager=trajectory"
CHECKPOINT = "turnwise.pipeline.checkpoint"
UPDATE = "turnwise_torch.strategy:TorchStrategy.update"
FAKE_UPDATE = "turnwise.testing.fake_model:FakeStrategy.update"


def test_the_same_seed_gives_the_same_run(lake: Any, whole_lake: Any) -> None:
    lake.train()
    lake.same(whole_lake)


def test_the_metrics_are_those_of_every_step_and_evaluation(whole_lake: Any) -> None:
    lines = whole_lake.metrics(timed=True)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "val/Lake/success" in line] == [0, 3, 6]
    losses = [line["policy/loss"] for line in lines[:-1]]
    assert len(set(losses)) == 6  # a run that learned nothing would prove nothing
    assert "time/save" not in lines[1]
    assert "time/save" in lines[2]  # metrics first, then the checkpoint: its time is reported with the next step


def test_another_seed_gives_another_run(lake: Any, whole_lake: Any) -> None:
    lake.train("seed=2", "max_steps=1", "eval_at_end=false", "save_steps=0")
    mine, theirs = lake.metrics()[0], whole_lake.metrics()[0]
    assert mine["policy/loss"] != theirs["policy/loss"]
    assert {k: v for k, v in mine.items() if k.startswith("val/")} != {}


def test_environments_that_step_in_threads_change_nothing(lake: Any, whole_lake: Any) -> None:
    lake.train("custom_envs.Lake.step=thread")
    lake.same(whole_lake)


def test_whole_conversations_are_as_reproducible(lake: Any) -> None:
    for out in ("first", "second"):
        lake.train(TRAJECTORY, "max_steps=3", f"output_dir={out}")
    lake.same(lake, "first", "second")
    assert lake.metrics("first")[0]["rollout/samples"] == 16  # one row for each conversation


@pytest.mark.parametrize(
    ("place", "nth", "left"),
    [
        (UPDATE, 8, [2]),  # in the fourth step, between its two updates
        (
            "turnwise_torch.strategy:TorchStrategy.export",
            2,
            [2],
        ),  # in the second checkpoint: the state is written, the model is not
    ],
)
def test_killed_and_resumed_is_as_if_it_had_not_been(
    lake: Any, whole_lake: Any, place: str, nth: int, left: list[int]
) -> None:
    killed = lake.process("train", "run.yaml", at=(place, nth, "kill"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    complete = [p for p in (lake.folder / "out/checkpoints").iterdir() if p.name.startswith("checkpoint-")]
    assert [int(p.name[-6:]) for p in complete] == left
    lake.train("resume_from_checkpoint=true")
    lake.same(whole_lake)
    assert lake.checkpoints() == whole_lake.checkpoints() == [2, 4, 6]


@pytest.mark.parametrize(
    ("place", "nth"),
    [
        (FAKE_UPDATE, 1),  # before anything was saved
        (FAKE_UPDATE, 6),
        ("turnwise.rollout:Scheduler.next_batch", 4),
        ("turnwise.rollout:Scheduler.evaluate", 2),
        ("turnwise.rollout:Scheduler.evaluate", 3),  # the last evaluation: the last checkpoint is there
        ("turnwise.testing.fake_model:FakeStrategy.save", 2),
        (f"{CHECKPOINT}:_make_durable", 2),  # written, but not renamed
        (f"{CHECKPOINT}:prune", 2),  # renamed
        ("turnwise.pipeline.loop:Loop._log", 4),
        ("turnwise_jsonl.logger:JsonlLogger.scalars", 4),
        ("turnwise.pipeline.report:write", 1),
    ],
)
def test_killed_anywhere_and_resumed(fake: Any, whole_fake: Any, place: str, nth: int) -> None:
    killed = fake.process("train", "run.yaml", at=(place, nth, "kill"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    fake.train("resume_from_checkpoint=true")
    fake.same(whole_fake)
    assert fake.checkpoints() == [2, 4, 6]


def test_what_adapts_from_step_to_step_is_in_the_checkpoint(fake: Any) -> None:
    adaptive = ["init_kl_coef=0.05", "target_kl=0.001", "kl_horizon=20"]
    fake.train(*adaptive, "output_dir=whole")
    coefficients = [line["critic/kl_coef"] for line in fake.metrics("whole")[:-1]]
    assert len(set(coefficients)) == 6
    killed = fake.process("train", "run.yaml", *adaptive, at=(FAKE_UPDATE, 10, "kill"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    fake.train(*adaptive, "resume_from_checkpoint=true")
    fake.same(fake, "out", "whole")


def test_killed_from_outside_twice_and_resumed_twice(fake: Any, whole_fake: Any) -> None:
    slow = "actor_infer.strategy_args.strategy_config={delay: 0.05}"
    for lines, resume in ((3, "false"), (5, "true")):
        kill_when_logged(fake.folder, lines, slow, f"resume_from_checkpoint={resume}")
    fake.train(slow, "resume_from_checkpoint=true")
    fake.same(whole_fake)


def kill_when_logged(folder: Path, lines: int, *overrides: str) -> None:
    metrics = folder / "out/metrics.jsonl"
    command = [sys.executable, "-m", "turnwise.cli.main", "train", "run.yaml", *overrides]
    running = subprocess.Popen(
        command, cwd=folder, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    running.kill()
    assert running.wait() == -signal.SIGKILL


def test_resumed_after_its_end_a_run_reports_again(fake: Any, whole_fake: Any) -> None:
    fake.train()
    (fake.folder / "out" / "report.md").unlink()
    fake.train("resume_from_checkpoint=true")
    fake.same(whole_fake)


def test_a_longer_run_goes_on_from_the_end_of_a_shorter(fake: Any, whole_fake: Any) -> None:
    fake.train("max_steps=4")
    fake.train("resume_from_checkpoint=true")
    assert fake.metrics()[:4] == whole_fake.metrics()[:4]  # a constant learning rate does not look ahead
    assert fake.metrics() == whole_fake.metrics()


def test_a_named_checkpoint_is_taken_up_and_later_ones_are_set_aside(fake: Any, whole_fake: Any) -> None:
    fake.train()
    result = fake.train("resume_from_checkpoint=out/checkpoints/checkpoint-000002")
    fake.same(whole_fake)
    assert "checkpoints-old-1" in result.stderr
    assert fake.checkpoints() == [2, 4, 6]
    assert sorted(p.name for p in (fake.folder / "out/checkpoints-old-1").iterdir()) == [
        "checkpoint-000004",
        "checkpoint-000006",
    ]


def test_a_run_that_begins_anew_never_resumes_from_the_one_before(fake: Any, whole_fake: Any) -> None:
    fake.train("seed=2")
    killed = fake.process("train", "run.yaml", at=("turnwise.rollout:Scheduler.next_batch", 4, "kill"))
    assert killed.returncode == -signal.SIGKILL
    fake.train("resume_from_checkpoint=true")
    fake.same(whole_fake)


def test_metrics_of_an_evaluation_are_logged_whatever_logging_steps(fake: Any, whole_fake: Any) -> None:
    fake.train("logging_steps=4")
    assert [line["step"] for line in fake.metrics()] == [0, 3, 4, 5, 6]
    assert fake.metrics() == [whole_fake.metrics()[step] for step in (0, 3, 4, 5, 6)]


AHEAD = {"fake": ["async_generation_ratio=2"], "lake": ["async_generation_ratio=1"]}


@pytest.fixture(scope="module")
def ahead_fake(make_fake: Any) -> Any:
    """The fakes' run two batches ahead, uninterrupted."""
    run = make_fake()
    run.train(*AHEAD["fake"])
    return run


@pytest.fixture(scope="module")
def ahead_lake(make_lake: Any) -> Any:
    """The real run one batch ahead, uninterrupted."""
    run = make_lake()
    run.train(*AHEAD["lake"])
    return run


def test_batches_ahead_are_as_old_as_the_ratio_and_no_older(ahead_fake: Any, ahead_lake: Any) -> None:
    for run, ratio in ((ahead_fake, 2), (ahead_lake, 1)):
        lines = [line for line in run.metrics() if "policy/loss" in line]
        for name in ("mean", "max"):
            assert [line[f"async/staleness/{name}"] for line in lines] == [min(step, ratio) for step in range(6)]
        assert {line["async/version_span"] for line in lines} == {0}
        assert {line["async/length_ratio"] for line in lines} == {1}
        assert all(0 < line["async/ess"] <= 1 for line in lines)
        assert lines[2]["correction/weight/mean"] != 1


def test_a_run_with_batches_ahead_is_as_reproducible(lake: Any, ahead_lake: Any) -> None:
    lake.train(*AHEAD["lake"], "custom_envs.Lake.step=thread")
    lake.same(ahead_lake)


def test_the_ratio_changes_the_run_and_none_is_the_synchronous_one(fake: Any, whole_fake: Any, ahead_fake: Any) -> None:
    fake.train("async_generation_ratio=0")
    fake.same(whole_fake)
    assert ahead_fake.metrics()[2]["policy/loss"] != whole_fake.metrics()[2]["policy/loss"]


@pytest.mark.parametrize(
    ("place", "nth"),
    [
        (FAKE_UPDATE, 1),  # two batches are played, nothing is saved
        (FAKE_UPDATE, 6),
        ("turnwise.rollout:Scheduler.next_batch", 4),
        ("turnwise.rollout:Scheduler.settled", 4),
        ("turnwise.rollout.worker:LocalExecutor.play", 30),  # in the middle of what is played ahead
        ("turnwise.rollout.worker:LocalExecutor.play", 41),
        ("turnwise.testing.fake_model:FakeBackend.receive", 4),
        ("turnwise.rollout:Scheduler.evaluate", 2),
        ("turnwise.rollout:Scheduler.evaluate", 3),
        ("turnwise.pipeline.queued:write", 2),
        ("turnwise.testing.fake_model:FakeStrategy.save", 2),
        (f"{CHECKPOINT}:_make_durable", 2),
        (f"{CHECKPOINT}:prune", 2),
        ("turnwise.pipeline.loop:Loop._log", 4),
    ],
)
def test_killed_with_batches_ahead_and_resumed(fake: Any, ahead_fake: Any, place: str, nth: int) -> None:
    killed = fake.process("train", "run.yaml", *AHEAD["fake"], at=(place, nth, "kill"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    fake.train(*AHEAD["fake"], "resume_from_checkpoint=true")
    fake.same(ahead_fake)
    assert fake.checkpoints() == [2, 4, 6]


@pytest.mark.parametrize(
    ("place", "nth"),
    [(UPDATE, 8), ("turnwise_hf.backend:HfBackend.receive", 5), ("turnwise.rollout:Scheduler.settled", 4)],
)
def test_weights_are_the_same_where_batches_ahead_were_killed_and_resumed(
    lake: Any, ahead_lake: Any, place: str, nth: int
) -> None:
    killed = lake.process("train", "run.yaml", *AHEAD["lake"], at=(place, nth, "kill"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    lake.train(*AHEAD["lake"], "resume_from_checkpoint=true")
    lake.same(ahead_lake)
    mine, theirs = (
        (run.folder / "out/checkpoints/checkpoint-000006/model/model.safetensors").read_bytes()
        for run in (lake, ahead_lake)
    )
    assert mine == theirs


@pytest.mark.parametrize(
    ("place", "nth"),
    [(FAKE_UPDATE, 5), ("turnwise.rollout:Scheduler.next_batch", 4), ("turnwise.rollout:Scheduler.settled", 3)],
)
def test_stopped_with_batches_ahead_and_resumed(fake: Any, ahead_fake: Any, place: str, nth: int) -> None:
    stopped = fake.process("train", "run.yaml", *AHEAD["fake"], at=(place, nth, "interrupt"))
    assert stopped.returncode == 130, stopped.stderr
    fake.train(*AHEAD["fake"], "resume_from_checkpoint=true")
    fake.same(ahead_fake)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            ["async_generation_ratio=1"],
            "async_generation_ratio was 2, is 1: what was played further ahead is trained first",
        ),
        (["async_generation_ratio=0"], "async_generation_ratio was 2, is 0: what was played further ahead"),
        (["async_generation_ratio=3"], "async_generation_ratio was 2, is 3: no longer bit for bit"),
        ([*AHEAD["fake"], "max_steps=8"], "max_steps was 6, is 8: nothing was played past it"),
    ],
)
def test_another_ratio_or_more_steps_go_on_with_a_warning(fake: Any, changed: list[str], told: str) -> None:
    killed = fake.process("train", "run.yaml", *AHEAD["fake"], at=(FAKE_UPDATE, 6, "kill"))
    assert killed.returncode == -signal.SIGKILL
    result = fake.train(*changed, "resume_from_checkpoint=true")
    assert told in result.stderr
    ratio = int(changed[0][-1])
    if not ratio:
        return
    ages = [line["async/staleness/max"] for line in fake.metrics() if line.get("async/staleness/max") is not None]
    assert ages[:4] == [0, 1, 2, 2]
    assert all(age <= ratio for age in ages[4:])


@pytest.mark.parametrize(
    "changed",
    ["seed=2", "train_env_manager={num_env_groups: 4, group_size: 2, tags: [Count]}"],
)
def test_groups_that_this_run_would_not_play_are_refused(fake: Any, changed: str) -> None:
    killed = fake.process("train", "run.yaml", *AHEAD["fake"], at=(FAKE_UPDATE, 6, "kill"))
    assert killed.returncode == -signal.SIGKILL
    result = fake.command("train", "run.yaml", *AHEAD["fake"], changed, "resume_from_checkpoint=true")
    assert result.exit_code != 0
    assert "which this run would not play. Fix: the tags, num_env_groups, group_size and seed" in result.stderr
