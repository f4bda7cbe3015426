"""GAE: the reference numbers whatever the rows, a slow reading of the definition, and what stands after the last
token."""

from __future__ import annotations

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
from turnwise_gae.config import GaeConfig
from turnwise_gae.gae import Gae

Turns = list[tuple[float, list[float]]]
"""Per turn the reward and the critic's values of its sampled tokens."""


def build(**options: Any) -> Gae:
    return Gae(GaeConfig(**options), EstimatorContext())


def to_batch(played: list[Turns], cut: Any = lambda i, k: False, stop: Any = "terminated") -> Batch:
    """One group; a new row begins at turn k > 0 of trajectory i where cut(i, k). The values of tokens that were not
    sampled are NaN."""
    batch = sketched([Sketch(0, [(reward, len(values)) for reward, values in one], stop=stop) for one in played], cut)
    values = np.full(len(batch.tokens), np.nan, np.float32)
    values[batch.sampled] = [v for one in played for _, mine in one for v in mine]
    return batch.with_tokens(values=values)


REF: Turns = [(0.5, [0.2, 0.3, 0.1]), (0.0, [0.4]), (1.0, [0.6])]
EXPECTED = [1.1292775, 1.08345, 1.351, 0.58, 0.4]


@pytest.mark.parametrize("cut", [lambda i, k: False, lambda i, k: k == 1, lambda i, k: True])
@pytest.mark.parametrize("stop", ["terminated", "truncated"])
def test_reference_numbers_whatever_the_rows_and_the_end(cut: Any, stop: str) -> None:
    batch = to_batch([REF], cut, stop)
    advantages, returns = build(gamma=1.0, lambd=0.95).compute(batch)
    np.testing.assert_allclose(advantages[batch.sampled], EXPECTED, atol=1e-6)
    np.testing.assert_allclose(returns[batch.sampled], np.add(EXPECTED, [0.2, 0.3, 0.1, 0.4, 0.6]), atol=1e-6)
    assert not advantages[~batch.tokens["response_mask"]].any()
    assert not returns[~batch.tokens["response_mask"]].any()


def test_the_defaults_are_those_of_the_reference() -> None:
    batch = to_batch([REF])
    np.testing.assert_allclose(build().compute(batch)[0][batch.sampled], EXPECTED, atol=1e-6)


def test_a_trajectory_knows_nothing_of_its_neighbour() -> None:
    both, alone = to_batch([REF, REF[:1]]), to_batch([REF[:1]])
    np.testing.assert_allclose(
        build().compute(both)[0][both.sampled][5:], build().compute(alone)[0][alone.sampled], atol=1e-12
    )


def test_a_turn_without_tokens_hands_its_reward_on_and_takes_no_step_of_the_discount() -> None:
    batch = to_batch([[(1.0, [0.0]), (2.0, []), (4.0, [0.0])]])
    advantages, _ = build(gamma=0.5, lambd=1.0).compute(batch)
    assert advantages[batch.sampled].tolist() == [5.0, 4.0]  # 1 + 2 on the first token, ½·4 from the second


def test_kl_in_the_reward_and_normalised_rewards_enter_the_recursion() -> None:
    batch = to_batch([[(1.0, [0.0, 0.0])], [(3.0, [0.0])]])
    kl = np.where(batch.tokens["response_mask"], 0.25, 9.0)
    assert build().compute(batch.with_tokens(kl_penalty=kl))[1][batch.sampled].tolist() == [
        -0.25 + 0.95 * 0.75,
        0.75,
        2.75,
    ]
    _, returns = build(lambd=1.0, reward_normalization=RewardNormalization(method="mean")).compute(batch)
    assert returns[batch.sampled].tolist() == [-1.0, -1.0, 1.0]


def test_what_it_declares() -> None:
    assert Gae.capabilities.needs == {"values"}
    assert Gae.token_rewards
    assert not Gae.whiten


@pytest.mark.parametrize("options", [{"gamma": -0.1}, {"lambd": 1.5}])
def test_options_outside_the_unit_interval_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        build(**options)


def test_turn_level_grouping_is_refused() -> None:
    with pytest.raises(ConfigError, match="traj_id"):
        build(reward_normalization=RewardNormalization(grouping="traj_id"))


numbers = st.sampled_from([0.0, 1.0, -0.5, 0.25])
turns = st.lists(st.tuples(numbers, st.lists(numbers, max_size=3)), max_size=4)


@given(
    played=st.lists(turns, max_size=4), gamma=st.sampled_from([1.0, 0.9, 0.0]), lambd=st.sampled_from([1.0, 0.95, 0.0])
)
def test_equals_the_definition_computed_by_loops(played: list[Turns], gamma: float, lambd: float) -> None:
    batch = to_batch(played)
    advantages, returns = build(gamma=gamma, lambd=lambd).compute(batch)
    expected, values = [], []
    for one in played:
        owners = [k for k, (_, mine) in enumerate(one) for _ in mine]
        v = [x for _, mine in one for x in mine]
        rewards = [0.0] * len(v)
        for k, (reward, _) in enumerate(one):
            until = [t for t in range(len(v)) if owners[t] <= k]
            if v:
                rewards[until[-1] if until else 0] += reward
        deltas = [r + gamma * after - now for r, after, now in zip(rewards, [*v[1:], 0.0], v)]
        expected += [sum((gamma * lambd) ** (s - t) * deltas[s] for s in range(t, len(v))) for t in range(len(v))]
        values += v
    np.testing.assert_allclose(advantages[batch.sampled], expected, atol=1e-9)
    np.testing.assert_allclose(returns[batch.sampled], np.array(expected) + values, atol=1e-9)
