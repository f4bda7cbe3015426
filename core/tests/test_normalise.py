"""Reward normalisation against the numbers of its definition and against loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data import Batch, Sample, Trajectory, Turn, build_batch
from turnwise.data.normalise import (
    RewardNormalization,
    normalise,
    normalise_scores,
    normalise_turns,
    normalised_token_rewards,
    settle,
)
from turnwise.data.numbers import LARGEST_REWARD
from turnwise.errors import ConfigError

SCORES = [0.8, 0.6, 0.9, 0.5, 0.7, 0.4, 0.85, 0.75]
NORMALISED = [0.643793, -0.500728, 1.216053, -1.072988, 0.071533, -1.645248, 0.929923, 0.357663]


def make_batch(
    rewards: list[list[float]], groups: list[int], tags: list[str] | None = None, rows: list[int] | None = None
) -> Batch:
    """One sampled token per turn; a trajectory's turns stand in one row, followed by `rows[i]` − 1 rows without a
    sampled token."""
    trajectories, samples = [], []
    for i, mine in enumerate(rewards):
        turns = tuple(
            Turn(
                np.zeros(1, np.int32),
                np.ones(1, np.int32),
                np.ones(1, np.bool_),
                None,
                np.zeros(1, np.int32),
                reward,
                anchor=k,
            )
            for k, reward in enumerate(mine)
        )
        trajectories.append(Trajectory(tags[i] if tags else "A", groups[i], i, 0, turns, "terminated"))
        n = len(mine)
        full = Sample(np.arange(n + 1), np.arange(n + 1) > 0, np.arange(n + 1) - 1, None, np.zeros(n + 1))
        idle = Sample(np.zeros(2), np.zeros(2, np.bool_), np.full(2, -1), None, np.full(2, -1))
        samples.append(([full] if n else []) + [idle] * ((rows[i] if rows else 1) - 1))
    return build_batch(trajectories, samples)


def scored(scores: list[float], groups: list[int], **more: Any) -> Batch:
    return make_batch([[s] for s in scores], groups, **more)


MEAN_STD = RewardNormalization(method="mean_std")


@pytest.mark.parametrize("method", ["mean_std", "asym_clip"])
def test_mean_std_reference_numbers(method: Any) -> None:
    got = normalise_scores(scored(SCORES, [0] * 8), RewardNormalization(method=method))
    np.testing.assert_allclose(got, NORMALISED, atol=1e-6)


def test_mean_subtracts_and_identity_keeps() -> None:
    batch = scored(SCORES, [0] * 8)
    np.testing.assert_allclose(
        normalise_scores(batch, RewardNormalization(method="mean")), np.array(SCORES) - 0.6875, atol=1e-12
    )
    np.testing.assert_allclose(normalise_scores(batch, None), SCORES)


def test_token_rewards_reference_numbers() -> None:
    got = normalised_token_rewards(make_batch([[0.2, 0.3, 0.5], [0, 0, 0.4]], [0, 0]), MEAN_STD)
    np.testing.assert_allclose(got, [0, 0.471403, 0.707105, -0.471403, 0, 0, 0, -0.707105], atol=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["mean", "mean_std"])
def test_the_largest_rewards_that_an_environment_may_give_overflow_nowhere(method: Any) -> None:
    batch = scored([LARGEST_REWARD, -LARGEST_REWARD, 0.0, 1.0], [0] * 4)
    got = normalise_scores(batch, RewardNormalization(method=method))
    assert np.isfinite(got).all()
    assert got[0] == -got[1] > 0


def test_grouping_by_tag_and_over_the_batch() -> None:
    batch = scored([1, 2, 3, 10], [0, 1, 2, 3], tags=["A", "B", "A", "B"])
    by_tag = normalise_scores(batch, RewardNormalization(grouping="tags", method="mean"))
    assert by_tag.tolist() == [-1, -4, 1, 4]
    assert normalise_scores(batch, RewardNormalization(grouping="batch", method="mean")).tolist() == [-3, -2, -1, 6]


def test_mean_from_the_group_and_deviation_from_the_batch() -> None:
    batch = scored([1, 2, 3, 10], [0, 0, 1, 1])
    sigma = np.std([1, 2, 3, 10], ddof=1) + 1e-6
    both = RewardNormalization(method="identity", norm_mean_type="group", norm_std_type="batch")
    np.testing.assert_allclose(normalise_scores(batch, both), np.array([-0.5, 0.5, -3.5, 3.5]) / sigma)
    only_std = RewardNormalization(method="mean", norm_std_type="batch")
    np.testing.assert_allclose(normalise_scores(batch, only_std), np.array([1, 2, 3, 10]) / sigma)
    only_mean = RewardNormalization(method="mean_std", norm_mean_type="batch")
    np.testing.assert_allclose(normalise_scores(batch, only_mean), [-3, -2, -1, 6])


@pytest.mark.parametrize("method", ["mean", "mean_std"])
@pytest.mark.parametrize("value", [0.1, 5.0, 1e12 + 0.1, -3e-9])
def test_a_scope_without_signal_gives_zero_and_never_a_raw_reward(method: Any, value: float) -> None:
    batch = make_batch([[value, 0.0], [0.0, value], [value, 0.0], [0.3, value]], [0, 0, 0, 1])
    settings = RewardNormalization(method=method)
    assert normalise_scores(batch, settings).tolist() == [0.0] * 4
    assert not normalised_token_rewards(batch, settings).any()


def test_deviation_just_above_the_threshold_is_a_signal() -> None:
    assert not normalise(np.array([0.0, 1.3e-6]), np.zeros(2), "mean_std").any()
    assert normalise(np.array([0.0, 1.6e-6]), np.zeros(2), "mean_std").all()


def test_members_that_do_not_train_are_ignored_and_get_zero() -> None:
    batch = make_batch([[1], [2], [6], [1e9]], [0, 0, 0, 0]).with_trajectories(
        trains=np.array([True, True, True, False])
    )
    settings = RewardNormalization(method="mean")
    assert normalise_scores(batch, settings).tolist() == [-2, -1, 3, 0]
    assert normalised_token_rewards(batch, settings)[batch.sampled].tolist() == [-2, -1, 3, 0]
    assert normalise_scores(batch, None).tolist() == [1, 2, 6, 0]
    assert normalise_turns(batch, np.array([1.0, 2, 6, 1e9]), settings).tolist() == [-2, -1, 3, 0]


def test_count_sample_counts_a_trajectory_once_per_row() -> None:
    batch = scored([0, 3], [0, 0], rows=[2, 1])
    rows = np.array([0.0, 0.0, 3.0])
    expected = (np.array([0.0, 3.0]) - rows.mean()) / (rows.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(
        normalise_scores(batch, RewardNormalization(method="mean_std", count="sample")), expected
    )


def test_turns_are_normalised_over_turns_also_within_a_trajectory() -> None:
    batch = make_batch([[0, 0, 0], [0]], [0, 0])
    values = np.array([1.0, 2.0, 3.0, 6.0])
    assert normalise_turns(batch, values, RewardNormalization(method="mean")).tolist() == [-2, -1, 0, 3]
    assert normalise_turns(batch, values, RewardNormalization(grouping="traj_id", method="mean")).tolist() == [
        -1,
        0,
        1,
        0,
    ]


def test_traj_id_is_refused_for_scores() -> None:
    settings = RewardNormalization(grouping="traj_id")
    assert settle(settings, unit="turn").grouping == "traj_id"
    with pytest.raises(ConfigError, match="grouping: 'traj_id'"):
        settle(settings)
    with pytest.raises(ConfigError, match="traj_group_id, batch or tags"):
        normalise_scores(scored([1, 2], [0, 0]), settings)


def test_settle_fills_only_what_is_not_given() -> None:
    assert settle(None, method="mean_std") == RewardNormalization(grouping="traj_group_id", method="mean_std")
    assert settle(RewardNormalization(method="mean"), method="mean_std").method == "mean"
    assert settle(RewardNormalization(grouping="batch"), method="mean_std") == RewardNormalization(
        grouping="batch", method="mean_std"
    )


def test_an_unknown_method_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="method"):
        RewardNormalization(method="whiten")  # type: ignore[arg-type]


def test_a_trajectory_without_tokens_counts_by_its_score() -> None:
    batch = make_batch([[4.0], [], [2.0]], [0, 0, 0])
    assert normalise_scores(batch, RewardNormalization(method="mean")).tolist() == [2, -2, 0]
    assert normalised_token_rewards(batch, RewardNormalization(method="mean"))[batch.sampled].tolist() == [2, 0]


def test_kl_penalty_is_subtracted_after_normalisation() -> None:
    batch = make_batch([[0.2, 0.3, 0.5], [0, 0, 0.4]], [0, 0])
    penalised = batch.with_tokens(kl_penalty=np.where(batch.tokens["response_mask"], 0.1, 7.0))
    difference = normalised_token_rewards(batch, MEAN_STD) - normalised_token_rewards(penalised, MEAN_STD)
    np.testing.assert_allclose(difference, np.where(batch.tokens["response_mask"], 0.1, 0.0))


def slow_normalise(values: list[float], labels: list[int], method: str) -> list[float]:
    out = []
    for value, label in zip(values, labels):
        scope = [v for v, other in zip(values, labels) if other == label]
        mean = sum(scope) / len(scope)
        sigma = (sum((v - mean) ** 2 for v in scope) / (len(scope) - 1)) ** 0.5 if len(scope) > 1 else 0.0
        if sigma <= 1e-6:
            out.append(0.0)
        else:
            out.append((value - mean) / (sigma + 1e-6) if method == "mean_std" else value - mean)
    return out


@given(
    members=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.sampled_from([0.0, 0.5, -1.0, 2.0, 0.1]), max_size=4)),
        min_size=1,
        max_size=12,
    ),
    method=st.sampled_from(["mean", "mean_std"]),
)
def test_scores_and_token_rewards_equal_the_loop_and_each_other(
    members: list[tuple[int, list[float]]], method: Any
) -> None:
    members = sorted(members, key=lambda m: m[0])
    batch = make_batch([rewards for _, rewards in members], [group for group, _ in members])
    expected = slow_normalise([sum(rewards) for _, rewards in members], [group for group, _ in members], method)
    np.testing.assert_allclose(normalise_scores(batch, RewardNormalization(method=method)), expected, atol=1e-9)
    tokens = normalised_token_rewards(batch, RewardNormalization(method=method))
    sums = np.bincount(batch.tokens["trajectory"], weights=tokens, minlength=len(members))
    np.testing.assert_allclose(sums, [e if rewards else 0.0 for e, (_, rewards) in zip(expected, members)], atol=1e-9)
