"""The metrics of a step, each computed by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from turnwise.data.batch import Batch, build_batch
from turnwise.data.normalise import RewardNormalization
from turnwise.data.rows import UpdateResult
from turnwise.data.trajectory import Trajectory, Turn, int32
from turnwise.pipeline import metrics
from turnwise.testing.synthetic import row_per_turn


def turn(prompt: int, sampled: int, reward: float, appended: int = 0) -> Turn:
    mask = np.array([True] * sampled + [False] * appended, np.bool_)
    ids = int32(range(1, sampled + appended + 1))
    return Turn(
        int32(range(1, prompt + 1)), ids, mask, np.zeros(len(ids), np.float32), int32([0] * len(ids)), reward, None
    )


def episode(
    group: int, member: int, turns: list[Turn], success: bool | None, stop: Any = "terminated", **more: Any
) -> Trajectory:
    return Trajectory("T", group, member, 1, tuple(turns), stop, success, **more)


PLAYED = [
    episode(0, 0, [turn(3, 2, 0.25), turn(8, 1, 0.75, appended=1)], True, metrics={"moves": 2.0}),
    episode(0, 1, [turn(4, 3, 0.0)], False, "turns", metrics={"moves": 4.0, "falls": 1.0}),
    episode(1, 0, [turn(2, 4, 0.5)], True),
    episode(1, 1, [], None, "length"),
]


@pytest.fixture
def batch() -> Batch:
    """Rows of (prompt, sampled, appended): (3, 2, 0), (8, 1, 1), (4, 3, 0), (2, 4, 0)."""
    return build_batch(PLAYED, [row_per_turn(t) for t in PLAYED])


def test_scores_groups_and_lengths(batch: Batch) -> None:
    assert metrics.batch_metrics(batch) == pytest.approx(
        {
            "critic/score/mean": (1.0 + 0.0 + 0.5 + 0.0) / 4,
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
            "rollout/turns/mean": (2 + 1 + 1 + 0) / 4,
            "rollout/samples": 4,
            "rollout/trajectories_without_samples": 1,
            "rollout/success": 2 / 4,  # the one that reports none had none: others of its tag report theirs
            "group/all_correct_ratio": 0,
            "group/all_wrong_ratio": 0,
            "rollout/stop/terminated": 0.5,
            "rollout/stop/turns": 0.25,
            "rollout/stop/length": 0.25,
            "tokens/prompt_length/mean": (3 + 8 + 4 + 2) / 4,
            "tokens/prompt_length/max": 8,
            "tokens/response_length/mean": (2 + 2 + 3 + 4) / 4,
            "tokens/response_length/max": 4,
            "tokens/batch_padded_seq_len": 10,
            "tokens/useful_ratio": (5 + 10 + 7 + 6) / 40,
            "tokens/sampled": 2 + 1 + 3 + 4,
            "tokens/total": 28,
        }
    )


def test_groups_that_all_win_or_all_lose_are_counted() -> None:
    played = [
        evolve(PLAYED[2], group=g, member=m, success=won)
        for g, m, won in ((0, 0, True), (0, 1, True), (1, 0, False), (1, 1, False), (2, 0, True))
    ]
    got = metrics.batch_metrics(build_batch(played, [row_per_turn(t) for t in played]))
    assert (got["group/all_correct_ratio"], got["group/all_wrong_ratio"]) == pytest.approx((2 / 3, 1 / 3))


def of_tag(tag: str, group: int, member: int, success: bool | None) -> Trajectory:
    return evolve(PLAYED[2], tag=tag, group=group, member=member, success=success)


def test_an_environment_that_reports_only_success_is_no_hundred_percent() -> None:
    played = [of_tag("T", g, m, True if (g, m) == (0, 0) else None) for g in range(2) for m in range(2)]
    got = metrics.batch_metrics(build_batch(played, [[] for _ in played]))
    assert (got["rollout/success"], got["group/all_correct_ratio"], got["group/all_wrong_ratio"]) == (0.25, 0.0, 0.5)
    assert metrics.environment_metrics(played)["env/T/success"] == 0.25
    assert metrics.evaluation_metrics(played, {"T": 4})["val/T/success"] == 0.25


def test_groups_of_a_tag_that_reports_no_success_are_neither_right_nor_wrong() -> None:
    played = [of_tag("T", 0, 0, False), of_tag("T", 0, 1, None), of_tag("U", 1, 0, None), of_tag("U", 1, 1, None)]
    got = metrics.batch_metrics(build_batch(played, [[] for _ in played]))
    assert (got["rollout/success"], got["group/all_correct_ratio"], got["group/all_wrong_ratio"]) == (0.0, 0.0, 1.0)
    assert "env/U/success" not in metrics.environment_metrics(played)


def test_a_tag_that_once_reported_success_has_none_where_nothing_is_reported() -> None:
    reporting = metrics.Reporting()
    silent = [of_tag("T", 0, 0, None), of_tag("U", 1, 0, None)]
    assert "rollout/success" not in metrics.batch_metrics(build_batch(silent, [[], []]), reporting)
    metrics.evaluation_metrics([of_tag("T", 0, 0, True)], {"T": 1}, reporting)
    again = metrics.Reporting.from_plain(json.loads(json.dumps(reporting.to_plain())))
    for known in (reporting, again):
        got = metrics.batch_metrics(build_batch(silent, [[], []]), known)
        assert (got["rollout/success"], got["group/all_wrong_ratio"]) == (0.0, 1.0)
        assert metrics.environment_metrics(silent, known)["env/T/success"] == 0.0
        assert "env/U/success" not in metrics.environment_metrics(silent, known)


def test_a_step_without_a_token_and_without_a_success_still_has_metrics() -> None:
    got = metrics.batch_metrics(build_batch([PLAYED[3]], [[]]))
    assert got["tokens/batch_padded_seq_len"] == 0
    assert got["rollout/trajectories_without_samples"] == 1
    assert "rollout/success" not in got
    nothing = metrics.batch_metrics(build_batch([], []))
    assert math.isnan(nothing["critic/score/mean"])


def test_advantages_and_their_spread_within_groups(batch: Batch) -> None:
    values = np.zeros(len(batch.tokens))
    values[batch.sampled] = [1.0, 2.0, 6.0, -1.0, -2.0, 0.0, 0.5, 0.5, 0.5, 1.5]  # trajectories: 3, 3 and 4 tokens
    penalised = batch.with_tokens(advantages=values, kl_penalty=0.1 * np.abs(values))
    assert metrics.advantage_metrics(penalised) == pytest.approx(
        {
            "critic/advantage/mean": 9.0 / 10,
            "critic/reward/mean": 0.375,
            "critic/advantage/max": 6.0,
            "critic/advantage/min": -2.0,
            "group/advantage_diff/mean": ((3.0 - -1.0) + 0.0) / 2,  # the trajectory without tokens has none
            "critic/kl_penalty/mean": 0.1 * 15 / 10,
        }
    )
    empty = build_batch([PLAYED[3]], [[]]).with_tokens(advantages=np.zeros(0))
    assert sorted(metrics.advantage_metrics(empty)) == ["critic/advantage/mean", "critic/reward/mean"]


def test_per_token_metrics_are_weighted_over_all_updates_of_the_step() -> None:
    results = [
        UpdateResult(1.0, 4.0, {"policy/entropy": (3.0, 10.0), "policy/kl": (1.0, 2.0)}),
        UpdateResult(3.0, 0.0, {"policy/entropy": (1.0, 30.0), "policy/clip_frac": (0.0, 0.0)}),
    ]
    got = metrics.update_metrics(results)
    assert math.isnan(got.pop("policy/clip_frac"))
    assert got == pytest.approx(
        {
            "policy/loss": 2.0,
            "policy/grad_norm": 2.0,
            "policy/updates": 2,
            "policy/skipped_updates": 0,
            "policy/entropy": 4 / 40,
            "policy/kl": 0.5,
        }
    )
    assert metrics.update_metrics(results[:1], "critic")["critic/updates"] == 1


def test_skipped_updates_are_counted_and_stay_out_of_the_means() -> None:
    results = [UpdateResult(1.0, 3.0, {"policy/kl": (4.0, 8.0)}), UpdateResult(math.nan, math.inf, skipped=True)]
    expected = {
        "policy/loss": 1.0,
        "policy/grad_norm": 3.0,
        "policy/updates": 2,
        "policy/skipped_updates": 1,
        "policy/kl": 0.5,
    }
    assert metrics.update_metrics(results) == expected
    assert metrics.update_metrics([]) == {}


def test_evaluation_metrics_are_by_tag_and_over_all_and_count_what_could_not_be_played() -> None:
    got = metrics.evaluation_metrics([*PLAYED, evolve(PLAYED[0], tag="U")], {"T": 5, "U": 1, "V": 2})
    assert got["val/T/score/mean"] == 0.375
    assert got["val/T/success"] == 2 / 4
    assert got["val/T/turns/mean"] == 1.0
    assert got["val/T/failed"] == pytest.approx(0.2)
    assert (got["val/T/moves"], got["val/T/falls"]) == (3.0, 1.0)
    assert (got["val/U/success"], got["val/U/failed"]) == (1.0, 0.0)
    assert (got["val/V/failed"], math.isnan(got["val/V/score/mean"]), "val/V/success" in got) == (1.0, True, False)
    assert got["val/score/mean"] == pytest.approx((1.5 + 1.0) / 5)
    assert got["val/success"] == 3 / 5


def test_environment_metrics_are_by_tag() -> None:
    got = metrics.environment_metrics([*PLAYED, evolve(PLAYED[1], tag="U")])
    assert got["env/T/success"] == 2 / 4
    assert (got["env/U/success"], got["env/U/moves"], got["env/U/score/mean"]) == (0.0, 4.0, 0.0)
    assert metrics.environment_metrics([]) == {}


def test_memory_is_reported_in_gib() -> None:
    assert 0.01 < metrics.system_metrics()["system/cpu_memory"] < 1000


def test_the_mean_reward_is_that_of_the_normalised_scores(batch: Batch) -> None:
    batch = batch.with_tokens(advantages=np.zeros(len(batch.tokens)))
    by_group = RewardNormalization(grouping="traj_group_id", method="mean")
    assert metrics.advantage_metrics(batch, by_group)["critic/reward/mean"] == pytest.approx(0.0)
    for as_it_is in (
        None,
        RewardNormalization(grouping="traj_id", method="mean"),
        RewardNormalization(grouping="batch", method="identity"),
    ):
        assert metrics.advantage_metrics(batch, as_it_is)["critic/reward/mean"] == pytest.approx(
            float(batch.trajectories["scores"].mean())
        )
