"""Estimators of scores and of token returns: reference numbers, loops that follow the definitions, independence of how
rows are cut."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.contracts.estimator import EstimatorContext
from turnwise.data import Batch
from turnwise.data.normalise import RewardNormalization
from turnwise.data.ops import whiten
from turnwise.errors import ConfigError
from turnwise.testing.synthetic import Sketch, sketched
from turnwise_grpo import advantage_estimators

NAMES = ["grpo", "reinforce", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
SCORES = [0.8, 0.6, 0.9, 0.5, 0.7, 0.4, 0.85, 0.75]


def build(name: str, **options: Any) -> Any:
    implementation = next(i for i in advantage_estimators() if i.name == name)
    found = []
    for target in (implementation.config, implementation.target):
        module, attribute = target.split(":")
        found.append(getattr(importlib.import_module(module), attribute))
    return found[1](found[0](**options), EstimatorContext())


def one_turn(scores: list[float], groups: list[int] | None = None, tokens: int = 2) -> list[Sketch]:
    return [Sketch(groups[i] if groups else 0, ((score, tokens),)) for i, score in enumerate(scores)]


def per_trajectory(batch: Batch, advantages: np.ndarray) -> np.ndarray:
    """The one value that all sampled tokens of each trajectory carry; NaN for one without sampled tokens."""
    out = np.full(len(batch.trajectories), np.nan)
    for i in range(len(out)):
        mine = advantages[(batch.tokens["trajectory"] == i) & batch.tokens["response_mask"]]
        if len(mine):
            assert (mine == mine[0]).all()
            out[i] = mine[0]
    return out


REFERENCE = {
    "grpo": [0.643793, -0.500728, 1.216053, -1.072988, 0.071533, -1.645248, 0.929923, 0.357663],
    "rloo": [0.128571, -0.1, 0.242857, -0.214286, 0.014286, -0.328571, 0.185714, 0.071429],
    "reinforce_plus_plus_baseline": [s - 0.6875 for s in SCORES],
}


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_numbers(name: str) -> None:
    batch = sketched(one_turn(SCORES))
    advantages, returns = build(name).compute(batch)
    np.testing.assert_allclose(per_trajectory(batch, advantages), REFERENCE[name], atol=1e-6)
    assert np.array_equal(advantages, returns)


@pytest.mark.parametrize("name", ["reinforce", "reinforce_plus_plus"])
def test_returns_discount_over_sampled_tokens_and_skip_observations(name: str) -> None:
    batch = sketched([Sketch(0, ((1.0, 2), (0.0, 1), (4.0, 1)))])
    _, returns = build(name, gamma=0.5).compute(batch)
    # rewards along the sampled tokens: 0 1 0 4
    assert returns[batch.sampled].tolist() == [1.0, 2.0, 2.0, 4.0]
    assert not returns[~batch.tokens["response_mask"]].any()


def test_reinforce_keeps_intermediate_rewards_when_it_normalises() -> None:
    batch = sketched([Sketch(0, ((0.2, 1), (0.3, 1), (0.5, 1))), Sketch(0, ((0.0, 1), (0.0, 1), (0.4, 1)))])
    advantages, _ = build("reinforce", reward_normalization=RewardNormalization(method="mean_std")).compute(batch)
    rewards = [0.471403, 0.707105, -0.471403, 0, 0, -0.707105]
    expected = [sum(rewards[:3]), sum(rewards[1:3]), rewards[2], rewards[5], rewards[5], rewards[5]]
    np.testing.assert_allclose(advantages[batch.sampled], expected, atol=3e-6)


def test_what_the_estimators_declare() -> None:
    built = {name: build(name) for name in NAMES}
    assert {name for name, e in built.items() if e.token_rewards} == {"reinforce", "reinforce_plus_plus"}
    assert {name for name, e in built.items() if e.whiten} == {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}
    of_turns = {"step_reinforce", "agentic_reinforce"}  # see test_grpo_turn_estimators.py
    assert set(built) | of_turns == {i.name for i in advantage_estimators()}


def test_defaults_of_normalisation_are_filled_in_where_a_user_gave_only_the_scope() -> None:
    batch = sketched(one_turn([1.0, 2.0, 3.0, 6.0], groups=[0, 0, 1, 1]))
    over_the_batch = RewardNormalization(grouping="batch")
    advantages, _ = build("grpo", reward_normalization=over_the_batch).compute(batch)
    expected = (np.array([1, 2, 3, 6]) - 3) / (np.std([1, 2, 3, 6], ddof=1) + 1e-6)
    np.testing.assert_allclose(per_trajectory(batch, advantages), expected)
    advantages, _ = build("reinforce", reward_normalization=over_the_batch).compute(batch)
    assert per_trajectory(batch, advantages).tolist() == [1, 2, 3, 6]


@pytest.mark.parametrize("name", NAMES)
def test_turn_level_grouping_is_refused_when_built(name: str) -> None:
    with pytest.raises(ConfigError, match="traj_id"):
        build(name, reward_normalization=RewardNormalization(grouping="traj_id"))


@pytest.mark.parametrize("gamma", [-0.1, 1.5])
def test_a_discount_outside_the_unit_interval_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        build("reinforce", gamma=gamma)


GROUP_RELATIVE = ["grpo", "rloo", "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_group_of_one_and_a_group_of_equal_scores_give_zero(name: str) -> None:
    batch = sketched(one_turn([5.0, 0.1, 0.1, 0.1, 1.0, 2.0], groups=[0, 1, 1, 1, 2, 2]))
    advantages, _ = build(name).compute(batch)
    values = per_trajectory(batch, advantages)
    assert values[:4].tolist() == [0.0] * 4
    assert values[4] < 0 < values[5]


@pytest.mark.parametrize("name", NAMES)
def test_trajectories_without_samples_or_turns_count_in_their_group_and_never_crash(name: str) -> None:
    played = [Sketch(0, ((1.0, 2),)), Sketch(0, ((5.0, 0),)), Sketch(0, ()), Sketch(1, ((3.0, 0),))]
    batch = sketched(played)
    advantages, returns = build(name).compute(batch)
    assert np.isfinite(advantages).all()
    assert advantages.dtype == returns.dtype == np.float64
    assert advantages.shape == returns.shape == (len(batch.tokens),)
    expected = {"grpo": -1.0 / (7.0**0.5 + 1e-6), "rloo": -1.5, "reinforce_plus_plus_baseline": -1.0}.get(name, 1.0)
    np.testing.assert_allclose(advantages[batch.sampled], [expected] * 2, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("played", [[], [Sketch(0, ()), Sketch(0, ((1.0, 0),))]])
def test_a_batch_without_tokens_gives_no_advantage(name: str, played: list[Sketch]) -> None:
    advantages, returns = build(name).compute(sketched(played))
    assert advantages.shape == returns.shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_trajectories_that_a_filter_dropped_are_ignored_and_get_zero(name: str) -> None:
    scores = [1.0, 2.0, 6.0, 4.0, 1e6, -1e6]
    groups = [0, 0, 0, 1, 1, 1]
    keep = np.array([True, True, True, True, False, False])
    advantages, _ = build(name).compute(sketched(one_turn(scores, groups)).with_trajectories(trains=keep))
    alone, _ = build(name).compute(sketched(one_turn(scores[:4], groups[:4])))
    np.testing.assert_allclose(advantages[: len(alone)], alone, atol=1e-12)
    assert not advantages[len(alone) :].any()


def test_unequal_groups_are_each_normalised_by_their_own_size() -> None:
    batch = sketched(one_turn([0.0, 1.0, 0.0, 1.0, 1.0], groups=[0, 0, 1, 1, 1]))
    advantages, _ = build("rloo").compute(batch)
    np.testing.assert_allclose(per_trajectory(batch, advantages), [-1, 1, -1, 0.5, 0.5])


def test_kl_in_the_reward_reaches_the_returns() -> None:
    batch = sketched([Sketch(0, ((1.0, 2), (2.0, 1)))])
    kl = np.where(batch.tokens["response_mask"], 0.25, 9.0)
    advantages, _ = build("reinforce").compute(batch.with_tokens(kl_penalty=kl))
    assert advantages[batch.sampled].tolist() == [2.25, 2.5, 1.75]
    score_estimator, _ = build("grpo").compute(batch.with_tokens(kl_penalty=kl))
    assert not score_estimator.any()


turn = st.tuples(st.sampled_from([0.0, 1.0, -0.5, 0.25, 0.1]), st.integers(0, 3))
group = st.lists(st.lists(turn, max_size=4).map(tuple), min_size=1, max_size=4)
groups = st.lists(group, min_size=1, max_size=4).map(
    lambda gs: [Sketch(g, turns) for g, members in enumerate(gs) for turns in members]
)
normalization = st.sampled_from(
    [
        None,
        *(
            RewardNormalization(grouping=g, method=m)
            for g in ("traj_group_id", "batch")
            for m in ("identity", "mean", "mean_std")
        ),
    ]
)


def options_for(name: str, gamma: float) -> dict[str, Any]:
    return {"gamma": gamma} if name in ("reinforce", "reinforce_plus_plus") else {}


@pytest.mark.parametrize("name", NAMES)
@given(
    played=groups, cuts=st.randoms(use_true_random=False), normalize=normalization, gamma=st.sampled_from([1.0, 0.9])
)
def test_advantages_are_the_same_whatever_the_rows(
    name: str, played: list[Sketch], cuts: Any, normalize: Any, gamma: float
) -> None:
    estimator = build(name, reward_normalization=normalize, **options_for(name, gamma))
    results = []
    for cut in (lambda i, k: False, lambda i, k: True, lambda i, k: cuts.random() < 0.5):
        batch = sketched(played, cut)
        advantages, returns = estimator.compute(batch)
        assert not advantages[~batch.tokens["response_mask"]].any()
        assert not returns[~batch.tokens["response_mask"]].any()
        results.append((advantages[batch.sampled], returns[batch.sampled], whiten(advantages[batch.sampled])))
    for other in results[1:]:
        for mine, theirs in zip(results[0], other):
            assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
@given(played=groups, random=st.randoms(use_true_random=False))
def test_renumbering_the_groups_permutes_the_advantages(name: str, played: list[Sketch], random: Any) -> None:
    order = sorted({p.group for p in played})
    random.shuffle(order)
    renumbered = [Sketch(new, p.turns) for new, old in enumerate(order) for p in played if p.group == old]
    estimator = build(name)
    batch, other = sketched(played), sketched(renumbered)
    mine, theirs = estimator.compute(batch)[0], estimator.compute(other)[0]
    by_group = {g: mine[batch.trajectories["group"][batch.tokens["trajectory"]] == g] for g in order}
    expected = np.concatenate([by_group[g] for g in order])
    np.testing.assert_allclose(theirs, expected, atol=1e-12)


def slow(name: str, played: list[Sketch], gamma: float) -> list[list[float]]:
    """Advantages per sampled token of each trajectory, before whitening, one token after the other."""
    out = []
    for me in played:
        count = sum(n for _, n in me.turns)
        scores = [p.score for p in played if p.group == me.group]
        mean = sum(scores) / len(scores)
        sigma = (sum((s - mean) ** 2 for s in scores) / max(1, len(scores) - 1)) ** 0.5
        live = len(scores) > 1 and sigma > 1e-6
        if name == "grpo":
            out.append([(me.score - mean) / (sigma + 1e-6) if live else 0.0] * count)
        elif name == "reinforce_plus_plus_baseline":
            out.append([me.score - mean] * count)
        elif name == "rloo":
            others = len(scores) - 1
            out.append([me.score - (sum(scores) - me.score) / others if others else 0.0] * count)
        else:
            owners = [k for k, (_, n) in enumerate(me.turns) for _ in range(n)]
            rewards = [0.0] * count
            for k, (reward, _) in enumerate(me.turns):
                until = [t for t in range(count) if owners[t] <= k]
                if count:
                    rewards[until[-1] if until else 0] += reward
            out.append([sum(gamma ** (s - t) * rewards[s] for s in range(t, count)) for t in range(count)])
    return out


@pytest.mark.parametrize("name", NAMES)
@given(played=groups, gamma=st.sampled_from([1.0, 0.9, 0.0]))
def test_equals_the_definition_computed_by_loops(name: str, played: list[Sketch], gamma: float) -> None:
    batch = sketched(played)
    advantages, returns = build(name, **options_for(name, gamma)).compute(batch)
    expected = [x for one in slow(name, played, gamma) for x in one]
    np.testing.assert_allclose(advantages[batch.sampled], expected, atol=1e-9)
    np.testing.assert_allclose(returns[batch.sampled], expected, atol=1e-9)
