"""Runs with a critic: its values are used, it learns with sizes and rates of its own, and killed and resumed it is as
if it had not been.

The other estimators and the group filters reach a run by their names, too."""

from __future__ import annotations

import importlib
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CRITIC = (
    (
        "plugins=[turnwise-gymnasium, turnwise-managers, turnwise-hf, turnwise-torch, turnwise-gae, turnwise-losses,"
        " turnwise-batching]"
    ),
    "adv_estimator=gae",
    "gamma=0.99",
    "lambd=0.9",
    "kl_loss_coef=0",
    "max_steps=2",
    "eval_steps=2",
    "save_steps=1",
    (
        "critic={training_args: {learning_rate: 0.03, lr_scheduler_type: linear, per_device_train_batch_size: 2,"
        " gradient_accumulation_steps: 2}}"
    ),
)
UPDATE = "turnwise_torch.strategy:TorchStrategy.update"


@pytest.fixture(scope="module")
def whole(make_lake: Any) -> Any:
    """Two steps, uninterrupted; what the roles were called with, by role and method."""
    strategy = importlib.import_module("turnwise_torch.strategy").TorchStrategy
    calls: list[tuple[str, str, Any, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        for method in ("values", "logprobs", "update"):
            original = getattr(strategy, method)

            def watched(self: Any, rows: Any, original: Any = original, method: str = method) -> Any:
                result = original(self, rows)
                calls.append((self.context.role, method, rows, result))
                return result

            patch.setattr(strategy, method, watched)
        run = make_lake()
        run.train(*CRITIC)
    return run, calls


def test_the_critic_has_its_own_number_of_updates_and_its_own_rates(whole: Any) -> None:
    _, calls = whole
    rates = {
        role: [round(u.lr, 9) for r, m, u, _ in calls if (r, m) == (role, "update")]
        for role in ("actor_train", "critic")
    }
    assert rates["actor_train"] == [0.01, 0.0075, 0.005, 0.0025]  # U = 8 of 16
    assert rates["critic"] == [0.03, 0.02625, 0.0225, 0.01875, 0.015, 0.01125, 0.0075, 0.00375]  # U = 4 of 16


def test_values_are_asked_for_once_a_step_before_the_critic_s_updates_and_those_before_the_actor_s(whole: Any) -> None:
    _, calls = whole
    order = [(role, method) for role, method, _, _ in calls if method != "logprobs"]
    assert order == [("critic", "values"), *[("critic", "update")] * 4, *[("actor_train", "update")] * 2] * 2


def test_the_values_reach_advantages_and_returns(whole: Any) -> None:
    _, calls = whole
    values = [result for role, method, _, result in calls if method == "values"]
    assert not values[0].any()  # the head starts at zero
    assert np.unique(values[1]).size > 3  # and has learned since
    last = [u.rows.columns for role, method, u, _ in calls if (role, method) == ("critic", "update")][4:]
    for columns in last:
        np.testing.assert_allclose(columns["advantages"] + columns["values"], columns["returns"], atol=1e-9)
    seen = np.concatenate([columns["values"] for columns in last])
    np.testing.assert_allclose(np.sort(seen), np.sort(values[1]))


def test_the_metrics_report_the_critic(whole: Any) -> None:
    run, _ = whole
    first, last = run.metrics()[:2]
    for line in (first, last):
        assert line["critic/updates"] == 4
        assert line["critic/loss"] > 0
        assert line["critic/grad_norm"] > 0
        assert line["critic/value_loss"] == pytest.approx(line["critic/loss"], rel=0.5)
    assert first["critic/learning_rate"] == pytest.approx(0.01875)
    assert first["policy/learning_rate"] == pytest.approx(0.0075)
    assert first["critic/value/mean"] != last["critic/value/mean"]
    assert {"time/values", "time/critic_train"} <= set(run.metrics(timed=True)[0])


@pytest.mark.parametrize(
    ("place", "nth"),
    [
        (UPDATE, 9),  # in the second step, among the critic's updates
        (UPDATE, 11),  # between the critic's and the actor's
        (
            "turnwise_torch.strategy:TorchStrategy.save",
            4,
        ),  # in the second checkpoint, between the actor's state and the critic's
    ],
)
def test_killed_and_resumed_is_as_if_it_had_not_been(lake: Any, whole: Any, place: str, nth: int) -> None:
    killed = lake.process("train", "run.yaml", *CRITIC, at=(place, nth, "kill"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    saved = [path for path in (lake.folder / "out/checkpoints").iterdir() if path.name == "checkpoint-000001"]
    assert [(path / role).is_dir() for path in saved for role in ("actor_train", "critic")] == [True, True]
    lake.train(*CRITIC, "resume_from_checkpoint=true")
    lake.same(whole[0])


def test_without_a_critic_the_estimator_is_refused_before_anything_starts(lake: Any) -> None:
    result = lake.command("check", "run.yaml", *CRITIC[:-1])
    assert result.exit_code != 0
    assert "adv_estimator 'gae' needs the values of a critic" in result.output


SHORT = ("max_steps=1", "eval_steps=0", "save_steps=0", "kl_loss_coef=0")


def of(distribution: str) -> str:
    return CRITIC[0].replace("turnwise-gae", distribution)


@pytest.mark.parametrize(
    ("distribution", "options"),
    [
        (
            "turnwise-gigpo",
            (
                "adv_estimator=gigpo",
                "episode_reward_weight=0.0",
                "similarity_threshold=0.95",
                "reward_normalization.method=mean",
            ),
        ),
        ("turnwise-grpo", ("adv_estimator=step_reinforce", "step_reward_gamma=0.9")),
        ("turnwise-grpo", ("adv_estimator=agentic_reinforce", "gamma=0.9", "custom_envs.Lake.env_manager=trajectory")),
    ],
    ids=lambda value: value[0].partition("=")[2] if isinstance(value, tuple) else "",
)
def test_the_estimators_of_turns_train(lake: Any, distribution: str, options: tuple[str, ...]) -> None:
    lake.train(of(distribution), *options, *SHORT)
    line, *_ = lake.metrics()
    assert line["policy/grad_norm"] > 0
    assert line["critic/advantage/max"] > line["critic/advantage/min"]


def dropped(folder: Path) -> tuple[int, int]:
    """Of the groups of the first step: how many have scores without spread, and how many there are."""
    lines = [json.loads(line) for line in (folder / "out/trajectories/train.jsonl").read_text().splitlines()]
    scores: dict[int, set[float]] = {}
    for line in lines:
        scores.setdefault(line["group"], set()).add(line["score"])
    return sum(len(s) == 1 for s in scores.values()), len(scores)


def test_groups_without_a_signal_do_not_train(lake: Any) -> None:
    # nothing but the first move is played: a group of four agrees often
    played = ("custom_envs.Lake.max_steps=1", "train_env_manager.num_env_groups=16", "rollout_batch_size=64")
    lake.train("plugins=[]", *SHORT, *played, "group_filters=[no_signal]")
    line, *_ = lake.metrics()
    without, groups = dropped(lake.folder)
    assert 0 < without < groups
    assert line["rollout/rows_added"] == -4 * without  # one turn, one row
    assert line["rollout/filtered"] == 4 * without
    assert line["policy/updates"] == 8  # by_trajectory counts those that were played


def test_a_step_whose_filters_drop_everything_learns_nothing_and_goes_on(lake: Any) -> None:
    equal = (
        "custom_envs.Lake.env_config={random_start_goal: true, observation: relative, hole_penalty: 0.0,"
        " invalid_penalty: 0.0, goal_reward: 0.0}"
    )
    lake.train("plugins=[]", "max_steps=2", "eval_steps=0", "save_steps=0", "group_filters=[no_signal]", equal)
    for line in lake.metrics()[:2]:
        assert line["rollout/filtered"] == line["rollout/episodes"] == 16
        assert "policy/grad_norm" not in line  # there was no update
