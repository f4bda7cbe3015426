"""GiGPO: the reference numbers, a slow reading of the paper's definition, and which states are equal."""

from __future__ import annotations

import math
import statistics
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from turnwise.contracts.estimator import EstimatorContext
from turnwise.data import Batch
from turnwise.data.normalise import RewardNormalization
from turnwise.errors import ConfigError
from turnwise.testing.synthetic import Sketch, sketched
from turnwise_gigpo.anchors import anchor_groups, anchor_key, cluster_texts
from turnwise_gigpo.config import GigpoConfig
from turnwise_gigpo.gigpo import Gigpo


@frozen
class Played:
    """One trajectory: its group, and per turn the state, the reward and the number of sampled tokens."""

    group: int
    turns: tuple[tuple[Any, float, int], ...]


def to_batch(played: list[Played], stepwise: bool = False) -> Batch:
    """One row per trajectory, or one per turn; what sampled nothing has none."""
    drawn = [Sketch(one.group, [(reward, n, state) for state, reward, n in one.turns]) for one in played]
    return sketched(drawn, lambda i, k: stepwise)


def per_turn(batch: Batch, **options: Any) -> list[float]:
    """The value that all sampled tokens of each turn carry; NaN for a turn without any."""
    advantages, returns = Gigpo(GigpoConfig(**options), EstimatorContext()).compute(batch)
    assert np.array_equal(advantages, returns)
    out = []
    for row in range(len(batch.turns)):
        mine = advantages[batch.tokens["turn"] == row]
        assert (mine == mine[:1]).all()
        out.append(float(mine[0]) if len(mine) else math.nan)
    return out


PAPER = [
    Played(7, (("s0", 0.0, 2), ("s1", 0.0, 1), ("s2", 1.0, 3))),
    Played(7, (("s0", 0.0, 1), ("s1", 0.0, 2), ("s1", 0.0, 2))),
]
STEP = {
    "mean_std": [0.707106, 1.154698, 0.0, -0.707106, -0.577349, -0.577349],
    "mean": [0.45125, 0.633333, 0.0, -0.45125, -0.316667, -0.316667],
}
EPISODE = {"mean_std": 0.707106, "mean": 0.5}


@pytest.mark.parametrize("method", ["mean_std", "mean"])
@pytest.mark.parametrize("stepwise", [False, True])
def test_reference_numbers(method: Any, stepwise: bool) -> None:
    batch = to_batch(PAPER, stepwise)
    normalization = RewardNormalization(method=method)
    step = per_turn(batch, episode_reward_weight=0.0, reward_normalization=normalization)
    np.testing.assert_allclose(step, STEP[method], atol=1e-6)
    episode = per_turn(batch, step_reward_weight=0.0, reward_normalization=normalization)
    np.testing.assert_allclose(episode, [EPISODE[method]] * 3 + [-EPISODE[method]] * 3, atol=1e-6)
    both = per_turn(batch, episode_reward_weight=2.0, step_reward_weight=0.5, reward_normalization=normalization)
    np.testing.assert_allclose(both, 2 * np.array(episode) + 0.5 * np.array(step), atol=1e-12)


def test_the_defaults_are_mean_std_and_weights_of_one() -> None:
    expected = np.array(STEP["mean_std"]) + np.repeat([EPISODE["mean_std"], -EPISODE["mean_std"]], 3)
    np.testing.assert_allclose(per_turn(to_batch(PAPER)), expected, atol=2e-6)


def test_a_visit_without_sampled_tokens_counts_in_its_anchor_group() -> None:
    silent = [Played(0, (("a", 1.0, 1),)), Played(0, (("a", 0.0, 0),)), Played(0, (("b", 0.0, 1),))]
    step = per_turn(
        to_batch(silent), episode_reward_weight=0.0, reward_normalization=RewardNormalization(method="mean")
    )
    assert step[0] == 0.5
    assert math.isnan(step[1])
    assert step[2] == 0.0  # the only visit of its state


def test_equal_states_of_two_trajectory_groups_are_never_merged() -> None:
    apart = [Played(0, (("a", 1.0, 1),)), Played(1, (("a", 0.0, 1),)), Played(2, (("a", 5.0, 1),))]
    assert per_turn(to_batch(apart)) == [0.0, 0.0, 0.0]
    over_the_batch = per_turn(
        to_batch(apart), reward_normalization=RewardNormalization(grouping="batch", method="mean")
    )
    np.testing.assert_allclose(over_the_batch, [-1.0, -2.0, 3.0])  # the scope of A_E alone is wider


def test_two_visits_of_one_trajectory_are_compared() -> None:
    alone = [Played(0, (("a", 0.0, 1), ("a", 1.0, 1)))]
    step = per_turn(to_batch(alone), step_reward_gamma=0.5, reward_normalization=RewardNormalization(method="mean"))
    assert step == [-0.25, 0.25]  # R = .5, 1


def test_count_sample_weights_the_episode_s_statistics_by_rows() -> None:
    played = [Played(0, (("a", 0.0, 1), ("b", 0.0, 1), ("c", 1.0, 1))), Played(0, (("d", 0.0, 1),))]
    options = {"step_reward_weight": 0.0, "reward_normalization": RewardNormalization(method="mean", count="sample")}
    np.testing.assert_allclose(per_turn(to_batch(played, stepwise=True), **options), [0.25] * 3 + [-0.75])
    options["reward_normalization"] = RewardNormalization(method="mean")
    np.testing.assert_allclose(per_turn(to_batch(played, stepwise=True), **options), [0.5] * 3 + [-0.5])


def test_a_filtered_trajectory_is_in_no_statistic() -> None:
    played = [*PAPER, Played(7, (("s0", 9.0, 1),))]
    batch = to_batch(played).with_trajectories(trains=np.array([True, True, False]))
    assert per_turn(batch) == [*per_turn(to_batch(PAPER)), 0.0]


@pytest.mark.parametrize(
    "settings_of",
    [
        RewardNormalization(method="identity"),
        RewardNormalization(norm_std_type="batch"),
        RewardNormalization(grouping="traj_id"),
    ],
)
def test_a_normalisation_that_compares_nothing_is_refused(settings_of: RewardNormalization) -> None:
    with pytest.raises(ConfigError, match="reward_normalization"):
        Gigpo(GigpoConfig(reward_normalization=settings_of), EstimatorContext())


def test_scopes_of_mean_and_sigma_decide_the_method_of_both_levels() -> None:
    batch = to_batch(PAPER)
    only_mean = RewardNormalization(norm_mean_type="group", method="mean_std")
    np.testing.assert_allclose(
        per_turn(batch, episode_reward_weight=0.0, reward_normalization=only_mean), STEP["mean"], atol=1e-6
    )
    both = RewardNormalization(norm_mean_type="group", norm_std_type="batch", method="mean")
    np.testing.assert_allclose(
        per_turn(batch, episode_reward_weight=0.0, reward_normalization=both), STEP["mean_std"], atol=1e-6
    )


@pytest.mark.parametrize(
    "options", [{"step_reward_gamma": 1.1}, {"similarity_threshold": 0.0}, {"similarity_threshold": 1.5}]
)
def test_options_outside_their_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        GigpoConfig(**options)


DIFFERENT = [
    1,
    True,
    1.0,
    "1",
    b"1",
    None,
    np.int64(1),
    np.float32(1),
    np.array(1),
    np.array([1]),
    np.array([[1]]),
    np.array([1], np.int32),
    np.array([1.0]),
    np.zeros((2, 3)),
    np.zeros((3, 2)),
    np.array([1], object),
    np.array([True], object),
    [1],
    (1,),
    [True],
    [[1]],
    {1},
    {"a": 1},
    {"a": True},
    {"a": np.array([1])},
    [{"role": "user", "content": [{"type": "image", "image": np.zeros((2, 2, 3), np.uint8)}]}],
    [{"role": "user", "content": [{"type": "image", "image": np.zeros((2, 3, 2), np.uint8)}]}],
    float("nan"),
]


def objects(values: list[Any]) -> np.ndarray:
    out = np.empty(len(values), object)
    for i, value in enumerate(values):
        out[i] = value
    return out


def test_type_and_shape_are_kept_apart_and_equal_content_is_equal() -> None:
    twice = objects(DIFFERENT + [v.copy() if isinstance(v, np.ndarray | list | dict | set) else v for v in DIFFERENT])
    labels = anchor_groups(twice, np.zeros(len(twice), np.int64))
    half = len(DIFFERENT)
    assert len(set(labels.tolist())) == half
    assert labels[:half].tolist() == labels[half:].tolist()


LEAVES = (
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.0, -0.0, 1.0, float("nan"), "a", "b", "", b"a"])
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("ab", max_size=1), inner)
    ),
)


@given(st.lists(NESTED, max_size=12))
def test_nested_states_are_equal_exactly_where_their_keys_are(values: list[Any]) -> None:
    labels = anchor_groups(objects(values), np.zeros(len(values), np.int64)).tolist()
    keys = [anchor_key(value) for value in values]
    assert [a == b for a in labels for b in labels] == [a == b for a in keys for b in keys]


def test_the_order_of_keys_and_the_memory_layout_do_not_matter() -> None:
    assert anchor_key({"a": 1, "b": 2}) == anchor_key({"b": 2, "a": 1})
    array = np.arange(6).reshape(2, 3)
    assert anchor_key(np.asfortranarray(array)) == anchor_key(array)
    assert anchor_key(array.T) != anchor_key(array)
    assert anchor_key(-0.0) == anchor_key(0.0)


def test_a_state_that_cannot_be_compared_is_an_error_that_names_its_type() -> None:
    class Board:
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(ValueError, match=r"Board.*Fix: give info\['state_key'\]"):
        anchor_groups(objects([Board()]), np.zeros(1, np.int64))


def test_similar_texts_share_a_group_within_a_trajectory_group_only() -> None:
    texts = ["you see a red door", "you see a red doors", "a wall", 3, "you see a red door", "you see a red door"]
    labels = anchor_groups(objects(texts), np.array([0, 0, 0, 0, 0, 1]), 0.9)
    assert labels[0] == labels[1] == labels[4]
    assert len({labels[i] for i in (0, 2, 3, 5)}) == 4
    exact = anchor_groups(objects(texts), np.array([0, 0, 0, 0, 0, 1]))
    assert exact[0] == exact[4] != exact[1]


def slow_clusters(texts: list[str], threshold: float) -> list[int]:
    """The definition, visit by visit."""
    first: list[int] = []
    out = []
    for i, text in enumerate(texts):
        match = next((c for c in first if SequenceMatcher(None, text, texts[c]).ratio() >= threshold), None)
        if match is None:
            first.append(i)
            match = i
        out.append(match)
    return out


words = st.text("abc", max_size=5)


@given(
    texts=st.lists(words, max_size=12),
    threshold=st.sampled_from([0.3, 0.6, 0.8, 1.0]),
    group=st.randoms(use_true_random=False),
)
def test_clusters_are_those_of_the_definition(texts: list[str], threshold: float, group: Any) -> None:
    groups = sorted(group.randrange(2) for _ in texts)
    labels = anchor_groups(objects(texts), np.array(groups, np.int64), threshold)
    expected = []
    for g in (0, 1):
        mine = [t for t, h in zip(texts, groups) if h == g]
        expected += [(g, c) for c in slow_clusters(mine, threshold)]
    assert [[a == b for b in labels.tolist()] for a in labels.tolist()] == [
        [a == b for b in expected] for a in expected
    ]
    distinct = list(dict.fromkeys(texts))
    assert cluster_texts(distinct, threshold) == slow_clusters(distinct, threshold)


def slow(played: list[Played], gamma: float, method: str) -> list[float]:
    """A of every turn, from the definitions, in pure Python."""

    def normalised(x: float, among: list[float]) -> float:
        if len(among) < 2 or statistics.stdev(among) <= 1e-6:
            return 0.0
        centred = x - statistics.fmean(among)
        return centred / (statistics.stdev(among) + 1e-6) if method == "mean_std" else centred

    def to_go(turns: tuple[tuple[Any, float, int], ...]) -> list[float]:
        return [sum(gamma ** (j - k) * turns[j][1] for j in range(k, len(turns))) for k in range(len(turns))]

    out = []
    for me in played:
        group = [p for p in played if p.group == me.group]
        episode = normalised(sum(r for _, r, _ in me.turns), [sum(r for _, r, _ in p.turns) for p in group])
        for (state, _, _), mine in zip(me.turns, to_go(me.turns)):
            same = [
                R
                for p in group
                for (s, _, _), R in zip(p.turns, to_go(p.turns))
                if type(s) is type(state) and s == state
            ]
            out.append(episode + normalised(mine, same))
    return out


turn = st.tuples(st.sampled_from(["a", "b", 1, 1.0, True]), st.sampled_from([0.0, 1.0, -0.5]), st.integers(0, 2))
several = st.lists(st.lists(st.lists(turn, max_size=5).map(tuple), min_size=1, max_size=4), min_size=1, max_size=3)


@given(
    played=several.map(lambda gs: [Played(g, turns) for g, members in enumerate(gs) for turns in members]),
    gamma=st.sampled_from([0.95, 1.0, 0.0]),
    method=st.sampled_from(["mean", "mean_std"]),
)
def test_equals_the_definition_computed_by_loops(played: list[Played], gamma: float, method: Any) -> None:
    got = per_turn(to_batch(played), step_reward_gamma=gamma, reward_normalization=RewardNormalization(method=method))
    expected = [
        x if n else math.nan for x, (_, _, n) in zip(slow(played, gamma, method), (t for p in played for t in p.turns))
    ]
    np.testing.assert_allclose(got, expected, atol=1e-9)
