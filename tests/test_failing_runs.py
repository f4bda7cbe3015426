"""A run that a plugin's code ends is a failed run, whatever ended it, and what was trained until then is saved."""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

import pytest
from attrs import evolve

from turnwise.data.rows import UpdateResult
from turnwise.errors import EngineError
from turnwise.testing.fakes import (
    FakeBackend,
    FakeBatchAdjust,
    FakeEnvManager,
    FakeEstimator,
    FakeGroupFilter,
    FakeLogger,
    FakeModelSource,
    FakeStrategy,
)

CRITIC = [
    "plugins=[turnwise.testing.plugin, turnwise-gae]",
    "adv_estimator=gae",
    "critic={training_args: {learning_rate: 0.01, per_device_train_batch_size: 4},"
    " strategy_args: {strategy_name: fake_strategy}}",
]


def at_call(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, nth: int, error: BaseException) -> None:
    """`error` leaves the nth call of a method."""
    original, calls = getattr(owner, method), 0

    def dying(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise error
        return original(*args, **options)

    monkeypatch.setattr(owner, method, dying)


class Odd(BaseException):
    """Neither an Exception nor anything that Python itself raises."""


PLACES = [
    (FakeModelSource, "prepare", 1, "model_source 'fake_source'"),
    (FakeModelSource, "chat", 1, "model_source 'fake_source'"),
    (FakeEstimator, "__init__", 1, "advantage estimator 'fake_estimator'"),
    (FakeEstimator, "compute", 3, "adv_estimator 'fake_estimator'"),
    (FakeGroupFilter, "keep", 3, "group_filters"),
    (FakeBatchAdjust, "plan", 3, "batch_adjust_mode 'fake_adjust'"),
    (FakeEnvManager, "__init__", 1, "env manager 'fake_manager'"),
    (FakeEnvManager, "run", 30, "Count, group "),
    (FakeEnvManager, "samples", 20, "Count, group "),
    (FakeBackend, "__init__", 1, "inference backend 'fake_backend'"),
    (FakeBackend, "live", 3, "actor_infer"),
    (FakeBackend, "generate", 50, "the inference backend"),
    (FakeBackend, "pause", 3, "actor_infer"),
    (FakeBackend, "receivers", 3, "actor_infer"),
    (FakeBackend, "receive", 3, "actor_infer"),
    (FakeBackend, "resume", 3, "actor_infer"),
    (FakeStrategy, "__init__", 1, "train strategy 'fake_strategy'"),
    (FakeStrategy, "update", 5, "actor_train: update"),
    (FakeStrategy, "offer", 3, "actor_train: offer"),
    (FakeStrategy, "send", 3, "actor_train: send"),
    (FakeStrategy, "save", 1, "actor_train: save"),
]


@pytest.mark.parametrize("error", [SystemExit(0), Odd("odd")])
@pytest.mark.parametrize(("owner", "method", "nth", "who"), PLACES)
def test_a_plugin_that_ends_the_process_fails_the_run_and_is_named(
    fake: Any, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, nth: int, who: str, error: BaseException
) -> None:
    at_call(monkeypatch, owner, method, nth, error)
    got = fake.command("train", "run.yaml", "group_filters=[fake_filter]")
    assert got.exit_code in (1, 2)
    (line,) = (line for line in got.stderr.splitlines() if line.startswith("error: "))
    assert who in line
    assert f"ended by {type(error).__name__}" in line or f"raised {type(error).__name__}" in line, line
    assert "Fix: " in line
    assert ("saved: " in got.stderr) or (
        method == "__init__" and owner in (FakeEstimator, FakeEnvManager)
    )  # those are built to check, too


@pytest.mark.parametrize("method", ["scalars", "trajectories", "resume", "close"])
def test_a_logger_that_ends_the_process_is_switched_off_and_the_run_goes_on(
    fake: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    at_call(monkeypatch, FakeLogger, method, 1, SystemExit(0))
    got = fake.command("train", "run.yaml", "track_with=[fake_logger]")
    assert got.exit_code == 0
    assert f"logger fake_logger failed in {method} and is switched off: SystemExit: 0" in got.stderr
    assert fake.checkpoints() == [2, 4, 6]


def test_a_logger_that_ends_the_process_when_it_is_built_fails_the_run(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_call(monkeypatch, FakeLogger, "__init__", 1, SystemExit(0))
    got = fake.command("train", "run.yaml", "track_with=[fake_logger]")
    assert got.exit_code == 2
    assert "error: logger 'fake_logger' ended by SystemExit: 0" in got.stderr


@pytest.mark.parametrize("command", [["eval"], ["rollout"], ["check"], ["plan"], ["train"]])
def test_no_command_succeeds_by_the_exit_of_what_it_calls(
    fake: Any, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    for owner, method in ((FakeModelSource, "check"), (FakeModelSource, "prepare"), (FakeBatchAdjust, "updates")):
        at_call(monkeypatch, owner, method, 1, SystemExit(0))
    got = fake.command(*command, "run.yaml")
    assert got.exit_code in (1, 2)
    assert got.stderr.count("error: ") + got.stderr.count("config: ") == 1
    assert "SystemExit: 0" in got.stderr


# ---------------------------------------------------------------- what a failed run leaves


SAVED = [
    (FakeBackend, "generate", 61, 2),
    (FakeEstimator, "compute", 4, 3),
    (FakeBackend, "pause", 4, 3),
    (FakeBackend, "receive", 4, 3),
]


@pytest.mark.parametrize("error", [EngineError("an outage. Fix: wait"), RuntimeError("an outage"), SystemExit(0)])
@pytest.mark.parametrize(("owner", "method", "nth", "done"), SAVED)
def test_a_failed_run_saves_its_whole_weights_and_resumes_as_if_it_had_not_failed(
    fake: Any, whole_fake: Any, owner: type, method: str, nth: int, done: int, error: BaseException
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, owner, method, nth, error)
        got = fake.command("train", "run.yaml", "save_steps=0")
    assert got.exit_code in (1, 2)
    saved, resume = got.stderr.splitlines()[-2:]
    assert saved == f"saved: out/checkpoints/checkpoint-{done:06d}"
    assert fake.checkpoints() == [done]
    again = shlex.split(resume.removeprefix("resume: "))[1:]
    assert fake.command(*again).exit_code == 0
    fake.same(whole_fake)


def test_weights_in_the_middle_of_a_step_are_not_saved(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at_call(monkeypatch, FakeStrategy, "update", 6, RuntimeError("an outage"))  # the second of two updates of step 2
    got = fake.command("train", "run.yaml", "save_steps=0")
    assert got.exit_code == 1
    assert got.stderr.splitlines()[-1] == "saved: nothing yet"


@pytest.mark.parametrize(("sound", "critic"), [(6, False), (7, False), (6, True)])
def test_a_run_that_skipped_updates_end_saves_its_weights_unless_the_step_has_changed_them(
    fake: Any, monkeypatch: pytest.MonkeyPatch, sound: int, critic: bool
) -> None:
    """Of two updates a step: the last sound one ends the third step, or is the first of the fourth, or the critic makes
    one more."""
    original, calls = FakeStrategy.update, 0

    def going_bad(self: Any, update: Any) -> Any:
        nonlocal calls
        if self._context.head == "value":
            return original(self, update)
        calls += 1
        return original(self, update) if calls <= sound else UpdateResult(math.nan, math.nan, skipped=True)

    with monkeypatch.context() as patch:
        patch.setattr(FakeStrategy, "update", going_bad)
        more = CRITIC if critic else []
        got = fake.command("train", "run.yaml", "save_steps=0", "max_skipped_updates=0", *more)
    assert got.exit_code == 1
    assert "error: 1 update(s) of actor_train in a row made no step" in got.stderr
    if sound == 7 or critic:
        assert got.stderr.splitlines()[-1] == "saved: nothing yet"
    else:
        assert fake.checkpoints() == [3]
        assert got.stderr.splitlines()[-2] == "saved: out/checkpoints/checkpoint-000003"
        assert fake.command("train", "run.yaml", "resume_from_checkpoint=true").exit_code == 0


def test_a_run_that_trained_nothing_saves_nothing(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at_call(monkeypatch, FakeEstimator, "compute", 1, RuntimeError("an outage"))
    assert fake.command("train", "run.yaml").stderr.splitlines()[-1] == "saved: nothing yet"
    assert not (fake.folder / "out" / "checkpoints").exists()


def test_a_failure_to_save_after_a_failure_is_reported_besides(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at_call(monkeypatch, FakeEstimator, "compute", 4, EngineError("an outage. Fix: wait"))
    at_call(monkeypatch, FakeStrategy, "export", 1, SystemExit(0))
    got = fake.command("train", "run.yaml", "save_steps=0")
    assert got.exit_code == 1
    assert "error: an outage. Fix: wait" in got.stderr.splitlines()
    assert (
        "WARNING: the weights after 3 steps could not be saved: TrainerError: actor_train: export ended by"
        " SystemExit: 0" in got.stderr
    )
    assert got.stderr.splitlines()[-1] == "saved: nothing yet"


@pytest.mark.parametrize(("reward", "score"), [(1.7e308, r"inf"), (-1e200, r"-[\d.]+e\+200")])
def test_an_episode_whose_score_training_cannot_compute_with_fails_and_is_counted(
    fake: Any, monkeypatch: pytest.MonkeyPatch, reward: float, score: str
) -> None:
    original = FakeEnvManager.run

    async def punished(self: Any, *args: Any) -> Any:
        played = await original(self, *args)
        return evolve(played, turns=tuple(evolve(turn, reward=reward) for turn in (*played.turns, *played.turns)))

    monkeypatch.setattr(FakeEnvManager, "run", punished)
    got = fake.command("train", "run.yaml")
    assert got.exit_code == 1
    assert re.search(rf"Count: the score of the episode is {score}\. Fix: rewards and penalties of finite", got.stderr)
    assert "max_env_failure_rate" in got.stderr
