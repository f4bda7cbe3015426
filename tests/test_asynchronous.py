"""Whole runs whose weights come while episodes are open: the bound, evaluations, kills and what is played again."""

from __future__ import annotations

import json
import signal
from collections import Counter
from typing import Any

import pytest

FAKE_UPDATE = "turnwise.testing.fake_model:FakeStrategy.update"
WAYS = ["between_turns", "between_tokens"]
TICKING = [
    "async_generation_ratio=1",
    "runtime={use: fake_runtime, update: 1}",
    "actor_infer.strategy_args.strategy_config={token: 1}",
]
"""A token takes a tick, and so does an update: where a run is at the nth call of a function does not depend on the machine."""


def trained(run: Any) -> list[list[tuple[int, int]]]:
    """(group, member) of every trajectory, by step."""
    steps: dict[int, list[tuple[int, int]]] = {}
    for line in run.trajectories("train").splitlines():
        one = json.loads(line)
        steps.setdefault(one["step"], []).append((one["group"], one["member"]))
    return [sorted(steps[step]) for step in sorted(steps)]


def whole(steps: int, groups: int, size: int) -> list[list[tuple[int, int]]]:
    return [[(step * groups + s, m) for s in range(groups) for m in range(size)] for step in range(steps)]


def within(run: Any, ratio: int) -> None:
    """The bound on staleness, and evaluations of one version."""
    lines = run.metrics()
    assert all(line["async/staleness/max"] <= ratio for line in lines if "async/staleness/max" in line)
    assert {line["val/version_span"] for line in lines if "val/version_span" in line} <= {0}


@pytest.mark.parametrize("way", WAYS)
def test_a_real_run_keeps_its_bound_and_its_groups(lake: Any, way: str) -> None:
    longer = ["actor_infer.generating_args.max_new_tokens=24", "sequence_length=512", "kl_loss_coef=0"]
    lake.train("async_generation_ratio=1", f"weight_update={way}", *longer)
    within(lake, 1)
    assert trained(lake) == whole(6, 4, 4)
    lines = [line for line in lake.metrics() if "async/version_span" in line]
    assert all(line["async/version_span"] <= (way == "between_tokens") for line in lines)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("place", "nth"),
    [
        (FAKE_UPDATE, 6),
        (FAKE_UPDATE, 9),
        ("turnwise.testing.fake_model:FakeBackend.receive", 5),
        ("turnwise.pipeline.queued:write", 2),
        ("turnwise.rollout:Scheduler.evaluate", 2),
        ("turnwise.rollout.worker:LocalExecutor.play", 40),
    ],
)
def test_killed_with_open_episodes_everything_is_trained_once(fake: Any, way: str, place: str, nth: int) -> None:
    settings = [*TICKING, f"weight_update={way}"]
    killed = fake.process("train", "run.yaml", *settings, at=(place, nth, "kill"), ticks=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    fake.train(*settings, "resume_from_checkpoint=true", ticks=True)
    within(fake, 1)
    assert trained(fake) == whole(6, 2, 4)
    assert {line["rollout/attempts"] for line in fake.metrics() if "rollout/attempts" in line} == {8}
    last = [line for line in fake.metrics(timed=True) if "resume/replayed" in line][-1]
    assert last["resume/restarted"] == 0
    assert last["resume/replayed"] > 0


def test_stopped_with_open_episodes_and_resumed(fake: Any) -> None:
    settings = [*TICKING, "weight_update=between_turns"]
    place = ("turnwise.rollout:Scheduler.next_batch", 4, "interrupt")
    stopped = fake.process("train", "run.yaml", *settings, at=place, ticks=True)
    assert stopped.returncode == 130, stopped.stderr
    fake.train(*settings, "resume_from_checkpoint=true", ticks=True)
    within(fake, 1)
    assert trained(fake) == whole(6, 2, 4)


def test_failing_environments_are_tried_again_while_weights_come(fake: Any) -> None:
    fails = "custom_envs.Count.env_config={fails: raise, fails_every: 3}"
    fake.train(
        *TICKING,
        *("weight_update=between_tokens", fails, "train_env_manager.max_env_failure_rate=0.9", "eval_steps=0"),
        ticks=True,
    )
    within(fake, 1)
    sizes = Counter(line["rollout/episodes"] for line in fake.metrics() if "rollout/episodes" in line)
    assert set(sizes) == {8.0}  # a group that cannot be played is replaced, whole
