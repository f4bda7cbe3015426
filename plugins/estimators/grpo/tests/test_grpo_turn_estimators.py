"""Estimators with one value per turn: step_reinforce and agentic_reinforce, by hand and against loops that follow the
definitions."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.contracts.estimator import EstimatorContext
from turnwise.data import Batch
from turnwise.data.normalise import RewardNormalization
from turnwise.errors import ConfigError
from turnwise.testing.synthetic import Sketch, sketched
from turnwise_grpo.agentic_reinforce import AgenticReinforce
from turnwise_grpo.config import ReturnConfig, StepConfig
from turnwise_grpo.step_reinforce import StepReinforce

Turns = tuple[tuple[float, int], ...]
"""Per turn the reward and the number of sampled tokens."""
IDENTITY = RewardNormalization(method="identity")


def step(**options: Any) -> StepReinforce:
    return StepReinforce(StepConfig(**options), EstimatorContext())


def agentic(**options: Any) -> AgenticReinforce:
    return AgenticReinforce(ReturnConfig(**options), EstimatorContext())


def to_batch(groups: list[list[Turns]], stepwise: bool = False) -> Batch:
    """One row per trajectory, or one per turn; what sampled nothing has none."""
    drawn = [Sketch(g, one, i) for g, members in enumerate(groups) for i, one in enumerate(members)]
    return sketched(drawn, lambda i, k: stepwise)


def per_turn(batch: Batch, values: np.ndarray) -> list[float | None]:
    """The one value that all sampled tokens of each turn carry; None for a turn without any."""
    out: list[float | None] = []
    for row in range(len(batch.turns)):
        mine = values[batch.tokens["turn"] == row]
        assert (mine == mine[:1]).all()
        out.append(float(mine[0]) if len(mine) else None)
    return out


@pytest.mark.parametrize("stepwise", [False, True])
def test_step_reinforce_compares_the_turns_of_a_group(stepwise: bool) -> None:
    batch = to_batch([[((0.0, 2), (1.0, 1)), ((0.0, 3),)]], stepwise)
    advantages, returns = step(step_reward_gamma=0.5).compute(batch)  # R = .5 1 0, their mean .5
    assert per_turn(batch, returns) == [0.5, 1.0, 0.0]
    assert per_turn(batch, advantages) == [0.0, 0.5, -0.5]


def test_step_reinforce_counts_turns_without_sampled_tokens() -> None:
    batch = to_batch([[((0.0, 1), (4.0, 0))]])
    advantages, _ = step(step_reward_gamma=0.5).compute(batch)  # R = 2 4
    assert per_turn(batch, advantages) == [-1.0, None]


def test_step_reinforce_may_compare_within_one_trajectory_or_not_at_all() -> None:
    batch = to_batch([[((0.0, 1), (1.0, 1)), ((5.0, 1), (5.0, 1))]])
    within, _ = step(step_reward_gamma=1.0, reward_normalization=RewardNormalization(grouping="traj_id")).compute(batch)
    assert per_turn(batch, within) == [0.0, 0.0, 2.5, -2.5]
    plain, _ = step(step_reward_gamma=1.0, reward_normalization=IDENTITY).compute(batch)
    assert per_turn(batch, plain) == [1.0, 1.0, 10.0, 5.0]
    both, _ = step(step_reward_gamma=1.0, reward_normalization=RewardNormalization(method="mean_std")).compute(batch)
    returns = [1.0, 1.0, 10.0, 5.0]
    expected = [(r - statistics.fmean(returns)) / (statistics.stdev(returns) + 1e-6) for r in returns]
    np.testing.assert_allclose(per_turn(batch, both), expected)


def test_step_reinforce_discounts_by_095_unless_set() -> None:
    batch = to_batch([[((0.0, 1), (1.0, 1))]])
    assert per_turn(batch, step().compute(batch)[1]) == [0.95, 1.0]


def test_agentic_reinforce_discounts_from_segment_to_segment() -> None:
    batch = to_batch([[((1.0, 3), (2.0, 1), (4.0, 2))]])
    advantages, returns = agentic(gamma=0.5).compute(batch)
    assert per_turn(batch, advantages) == [3.0, 4.0, 4.0]
    assert np.array_equal(advantages, returns)


def test_agentic_reinforce_gives_the_reward_of_a_silent_turn_to_the_segment_before_else_to_the_first() -> None:
    batch = to_batch([[((8.0, 0), (1.0, 2), (2.0, 0), (4.0, 1))]])
    advantages, _ = agentic(gamma=0.5).compute(batch)
    assert per_turn(batch, advantages) == [None, 8.0 + 1.0 + 2.0 + 2.0, None, 4.0]


def test_agentic_reinforce_keeps_intermediate_rewards_when_it_normalises() -> None:
    batch = to_batch([[((0.2, 1), (0.3, 2), (0.5, 1)), ((0.0, 2), (0.0, 1), (0.4, 1))]])
    advantages, _ = agentic(reward_normalization=RewardNormalization(method="mean_std")).compute(batch)
    a, b = [0.471403, 0.707105, -0.471403], -0.707105
    np.testing.assert_allclose(per_turn(batch, advantages), [sum(a), a[1] + a[2], a[2], b, b, b], atol=3e-6)


def test_agentic_reinforce_subtracts_the_kl_of_every_token_of_the_segment() -> None:
    batch = to_batch([[((1.0, 2), (2.0, 1))]])
    kl = np.where(batch.tokens["response_mask"], 0.25, 9.0)
    advantages, _ = agentic(gamma=0.5).compute(batch.with_tokens(kl_penalty=kl))
    assert per_turn(batch, advantages) == [0.5 + 0.5 * 1.75, 1.75]


def test_what_they_declare() -> None:
    assert AgenticReinforce.token_rewards
    assert not StepReinforce.token_rewards
    assert not (AgenticReinforce.whiten or StepReinforce.whiten)


def test_normalisation_within_a_trajectory_is_for_turns_alone() -> None:
    with pytest.raises(ConfigError, match="traj_id"):
        agentic(reward_normalization=RewardNormalization(grouping="traj_id"))


@pytest.mark.parametrize("gamma", [-0.1, 1.5])
def test_a_discount_outside_the_unit_interval_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        step(step_reward_gamma=gamma)


def test_trajectories_that_a_filter_dropped_are_in_no_statistic() -> None:
    batch = to_batch([[((0.0, 1), (1.0, 1)), ((100.0, 1),)]]).with_trajectories(trains=np.array([True, False]))
    assert per_turn(batch, step(step_reward_gamma=0.0).compute(batch)[0]) == [-0.5, 0.5, 0.0]
    assert per_turn(batch, agentic().compute(batch)[0]) == [1.0, 1.0, 0.0]


turns = st.lists(st.tuples(st.sampled_from([0.0, 1.0, -0.5, 0.25]), st.integers(0, 3)), max_size=4).map(tuple)
several = st.lists(st.lists(turns, min_size=1, max_size=3), min_size=1, max_size=3)
gammas = st.sampled_from([1.0, 0.9, 0.0])


@given(groups=several, gamma=gammas, stepwise=st.booleans())
def test_step_reinforce_equals_its_definition(groups: list[list[Turns]], gamma: float, stepwise: bool) -> None:
    batch = to_batch(groups, stepwise)
    expected: list[float | None] = []
    for members in groups:
        returns = [
            [sum(gamma ** (j - k) * one[j][0] for j in range(k, len(one))) for k in range(len(one))] for one in members
        ]
        every = [r for one in returns for r in one]
        for one, mine in zip(members, returns):
            expected += [r - statistics.fmean(every) if n else None for r, (_, n) in zip(mine, one)]
    np.testing.assert_allclose(
        np.array(per_turn(batch, step(step_reward_gamma=gamma).compute(batch)[0]), float),
        np.array(expected, float),
        atol=1e-12,
    )


@given(groups=several, gamma=gammas, stepwise=st.booleans())
def test_agentic_reinforce_equals_its_definition(groups: list[list[Turns]], gamma: float, stepwise: bool) -> None:
    batch = to_batch(groups, stepwise)
    expected: list[float | None] = []
    for one in (one for members in groups for one in members):
        segments = [k for k, (_, n) in enumerate(one) if n]
        sums = dict.fromkeys(segments, 0.0)
        for k, (reward, _) in enumerate(one):
            if segments:
                sums[max((s for s in segments if s <= k), default=segments[0])] += reward
        for k in range(len(one)):
            later = [s for s in segments if s >= k]
            expected.append(sum(gamma**i * sums[s] for i, s in enumerate(later)) if k in sums else None)
    got = per_turn(batch, agentic(gamma=gamma).compute(batch)[0])
    np.testing.assert_allclose(np.array(got, float), np.array(expected, float), atol=1e-12)
