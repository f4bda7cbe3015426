"""From a batch to advantages: KL estimators and the adaptive coefficient by hand, the penalty against slow loops, and
the order of the steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.schema import RunConfig
from turnwise.contracts.estimator import EstimatorContext
from turnwise.contracts.group_filter import FilterContext
from turnwise.data.batch import Batch, Table
from turnwise.data.normalise import RewardNormalization, normalised_token_rewards
from turnwise.data.ops import discounted_sums, last_sampled
from turnwise.pipeline.advantages import adapted, add_kl_penalty, filter_groups, kl_estimate, mean_kl, with_advantages
from turnwise.testing.fakes import FakeEstimator, FakeFilterConfig, FakeGroupFilter
from turnwise.testing.runs import one_step
from turnwise.testing.synthetic import batch_of, one_row, played, row_per_turn, trajectories

CONFIG = one_step(
    rollout_batch_size=12,
    whiten_advantages=False,
)
CUTS = pytest.mark.parametrize("cut", [one_row, row_per_turn])


def settings(**changes: Any) -> RunConfig:
    return evolve(CONFIG, **changes)


def batch_with_kl(cut: Callable[..., Any] = one_row, seed: int = 0) -> Batch:
    """A batch of 12 trajectories (one without tokens) with old and reference log-probs, the same numbers whatever the
    rows."""
    batch = batch_of(trajectories(4, 3, seed), cut)
    draw = np.random.default_rng(seed)
    columns = {name: np.zeros(len(batch.tokens), np.float32) for name in ("old_log_probs", "ref_log_probs")}
    for column in columns.values():
        column[batch.sampled] = -draw.random(len(batch.sampled)) * 2
    return batch.with_tokens(**columns)


def along(batch: Batch, name: str) -> list[list[float]]:
    """A token column as one list of sampled tokens per trajectory, in the order in which they were sampled."""
    owner = batch.tokens["trajectory"]
    return [
        [float(batch.tokens[name][t]) for t in batch.sampled if owner[t] == i] for i in range(len(batch.trajectories))
    ]


def slow_kl(batch: Batch) -> list[list[float]]:
    """k1 per trajectory, in Python floats."""
    old, ref = along(batch, "old_log_probs"), along(batch, "ref_log_probs")
    return [[a - b for a, b in zip(mine, other)] for mine, other in zip(old, ref)]


def to_go(values: list[float], gamma: float) -> list[float]:
    """Σ_{s≥t} γ^{s−t} v_s, by the double sum itself."""
    return [sum(gamma ** (s - t) * values[s] for s in range(t, len(values))) for t in range(len(values))]


class TokenReturns:
    """Rewards to go over sampled tokens: an estimator that reads `token_level_rewards` less the penalty."""

    normalization: RewardNormalization | None = None
    token_rewards = True
    whiten = True
    gamma = 0.9

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        rewards = normalised_token_rewards(batch, RewardNormalization(method="identity"))
        out = np.zeros(len(batch.tokens))
        out[batch.sampled] = discounted_sums(
            rewards[batch.sampled], batch.tokens["trajectory"][batch.sampled], self.gamma
        )
        return out, out.copy()


@frozen
class Given:
    """An estimator that answers with fixed numbers on every token, prompts included."""

    values: np.ndarray
    whiten: bool = False
    token_rewards: bool = False
    normalization: RewardNormalization | None = None

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        out = np.full(len(batch.tokens), 77.0)
        out[batch.sampled] = self.values
        return out, 2 * out


def score_estimator() -> FakeEstimator:
    return FakeEstimator(None, EstimatorContext())


# ---------------------------------------------------------------- KL


@pytest.mark.parametrize(
    ("kind", "expected"), [("k1", 0.4054651), ("abs", 0.4054651), ("k2", 0.0822010), ("k3", 0.0721318)]
)
def test_kl_estimators_give_their_reference_values(kind: str, expected: float) -> None:
    got = kl_estimate(kind, np.array([math.log(0.3)]), np.array([math.log(0.2)]))
    assert got.dtype == np.float64
    assert got[0] == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("kind", "high", "low"),
    [("k1", 20, -20), ("abs", 20, 20), ("k2", 200, 200), ("k3", math.exp(-20) + 19, math.exp(20) - 21)],
)
def test_log_ratios_are_clamped_and_results_are_not(kind: str, high: float, low: float) -> None:
    got = kl_estimate(kind, np.array([-1.0, -50.0], np.float32), np.array([-40.0, -1.0], np.float32))
    np.testing.assert_allclose(got, [high, low], rtol=1e-12)


@given(st.floats(-25, 0), st.floats(-25, 0))
def test_kl_estimators_agree_with_their_formulas(lp: float, ref: float) -> None:
    d = min(max(lp - ref, -20.0), 20.0)
    one, two = np.array([lp]), np.array([ref])
    assert kl_estimate("k1", one, two)[0] == d
    assert kl_estimate("abs", one, two)[0] == abs(d)
    assert kl_estimate("k2", one, two)[0] == pytest.approx(d * d / 2, rel=1e-12)
    assert kl_estimate("k3", one, two)[0] == pytest.approx(math.exp(-d) + d - 1, rel=1e-9, abs=1e-12)
    assert kl_estimate("k3", one, two)[0] >= 0


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.06, 0.197952), (0.3, 0.202048), (0.1, 0.2), (0.11, 0.2 * (1 + 0.1 * 0.0512)), (-1.0, 0.197952)],
)
def test_the_adaptive_coefficient_gives_its_reference_values(kl: float, expected: float) -> None:
    assert adapted(0.2, kl, 0.1, 512, 10_000) == pytest.approx(expected, abs=1e-12)


@CUTS
def test_mean_kl_is_the_mean_over_trajectories_of_their_token_mean(cut: Callable[..., Any]) -> None:
    batch = batch_with_kl(cut)
    means = [sum(mine) / len(mine) for mine in slow_kl(batch) if mine]
    kl, count = mean_kl(batch, "k1")
    assert (kl, count) == (pytest.approx(sum(means) / len(means), rel=1e-6), 11)  # the twelfth has no token


def test_mean_kl_without_a_token_is_unknown() -> None:
    batch = batch_of([], one_row).with_tokens(old_log_probs=np.zeros(0), ref_log_probs=np.zeros(0))
    kl, count = mean_kl(batch, "k1")
    assert math.isnan(kl)
    assert count == 0


# ---------------------------------------------------------------- the penalty in the reward


@CUTS
def test_the_penalty_is_a_column_on_sampled_tokens_and_leaves_the_scores(cut: Callable[..., Any]) -> None:
    batch = batch_with_kl(cut)
    got = add_kl_penalty(batch, settings(kl_penalty="k1"), 0.3)
    for mine, expected in zip(along(got, "kl_penalty"), slow_kl(batch)):
        np.testing.assert_allclose(mine, [0.3 * kl for kl in expected], rtol=1e-6)
    assert not got.tokens["kl_penalty"][~batch.tokens["response_mask"]].any()
    np.testing.assert_array_equal(got.trajectories["scores"], batch.trajectories["scores"])
    np.testing.assert_array_equal(got.tokens["token_level_rewards"], batch.tokens["token_level_rewards"])


@CUTS
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_score_estimators_subtract_the_discounted_penalty_to_come(cut: Callable[..., Any], gamma: float) -> None:
    batch = batch_with_kl(cut)
    scores = batch.trajectories["scores"]
    got = with_advantages(add_kl_penalty(batch, settings(), 0.3), score_estimator(), settings(gamma=gamma))
    for i, (mine, kl) in enumerate(zip(along(got, "advantages"), slow_kl(batch))):
        of_group = [s for s, g in zip(scores, batch.trajectories["group"]) if g == batch.trajectories["group"][i]]
        centred = scores[i] - sum(of_group) / len(of_group)
        np.testing.assert_allclose(mine, [centred - 0.3 * rest for rest in to_go(kl, gamma)], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(got.tokens["returns"], score_estimator().compute(batch)[1])


@CUTS
def test_token_return_estimators_take_the_penalty_from_each_reward_and_only_there(cut: Callable[..., Any]) -> None:
    batch = batch_with_kl(cut)
    got = with_advantages(add_kl_penalty(batch, settings(), 0.3), TokenReturns(), settings(gamma=0.5))
    for mine, rewards, kl in zip(along(got, "advantages"), along(batch, "token_level_rewards"), slow_kl(batch)):
        np.testing.assert_allclose(mine, to_go([r - 0.3 * k for r, k in zip(rewards, kl)], 0.9), rtol=1e-6, atol=1e-7)


@CUTS
def test_kl_in_score_is_taken_from_score_and_rewards_before_anything_is_normalised(cut: Callable[..., Any]) -> None:
    batch = batch_with_kl(cut)
    got = add_kl_penalty(batch, settings(kl_in_score=True), 0.3)
    expected = [score - 0.3 * sum(kl) for score, kl in zip(batch.trajectories["scores"], slow_kl(batch))]
    np.testing.assert_allclose(got.trajectories["scores"], expected, rtol=1e-6)
    assert "kl_penalty" not in got.tokens
    for rewards, score in zip(along(got, "token_level_rewards"), expected):
        assert sum(rewards) == pytest.approx(score if rewards else 0.0, abs=1e-6)
    per_turn = np.bincount(got.turns["trajectory"], weights=got.turns["reward"], minlength=len(expected))
    np.testing.assert_allclose(
        per_turn, expected, rtol=1e-6, atol=1e-9
    )  # the score is still the sum of the turns' rewards
    assert set(np.flatnonzero(got.turns["reward"] != batch.turns["reward"])) <= {
        batch.tokens["turn"][t] for t in last_sampled(batch) if t >= 0
    }
    without = [r for row in along(batch, "token_level_rewards") for r in row[:-1]]
    assert [
        r for row in along(got, "token_level_rewards") for r in row[:-1]
    ] == without  # only the last token's reward moves
    advantages = with_advantages(got, score_estimator(), settings())
    groups = batch.trajectories["group"]
    for i, mine in enumerate(along(advantages, "advantages")):
        of_group = [s for s, g in zip(expected, groups) if g == groups[i]]
        np.testing.assert_allclose(mine, [expected[i] - sum(of_group) / len(of_group)] * len(mine), atol=1e-6)


# ---------------------------------------------------------------- whitening, mask, clip


def three_tokens() -> Batch:
    """One trajectory of which three tokens were sampled."""
    made = next(t for t in (played(g, 0, turns=1) for g in range(99)) if t.turns[0].response_mask.sum() == 3)
    return batch_of([made])


def test_whitening_comes_before_the_clip_and_leaves_the_returns() -> None:
    batch = three_tokens()
    got = with_advantages(batch, Given(np.array([1.0, 2.0, 4.0]), whiten=True), settings(whiten_advantages=None))
    np.testing.assert_allclose(along(got, "advantages"), [[-0.872872, -0.218218, 1.091089]], atol=1e-6)
    assert along(got, "returns") == [[2.0, 4.0, 8.0]]
    clipped = with_advantages(
        batch, Given(np.array([1.0, 2.0, 4.0]), whiten=True), settings(whiten_advantages=None, advantage_clip=0.5)
    )
    np.testing.assert_allclose(along(clipped, "advantages"), [[-0.5, -0.218218, 0.5]], atol=1e-6)
    assert along(clipped, "returns") == [[2.0, 4.0, 8.0]]


@pytest.mark.parametrize(
    ("default", "asked", "whitened"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_the_yaml_overrides_the_estimators_own_whitening(default: bool, asked: bool | None, whitened: bool) -> None:
    got = with_advantages(
        three_tokens(), Given(np.array([1.0, 2.0, 4.0]), whiten=default), settings(whiten_advantages=asked)
    )
    assert (along(got, "advantages") != [[1.0, 2.0, 4.0]]) == whitened


def test_the_penalty_is_subtracted_before_whitening() -> None:
    batch = batch_with_kl()
    plain = with_advantages(add_kl_penalty(batch, settings(), 0.3), score_estimator(), settings())
    white = with_advantages(add_kl_penalty(batch, settings(), 0.3), score_estimator(), settings(whiten_advantages=True))
    values = plain.tokens["advantages"][batch.sampled]
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    np.testing.assert_allclose(
        white.tokens["advantages"][batch.sampled], (values - mean) / math.sqrt(variance + 1e-8), atol=1e-9
    )


def test_nothing_that_an_estimator_leaks_stands_outside_the_mask() -> None:
    batch = three_tokens()
    got = with_advantages(batch, Given(np.array([1.0, 2.0, 4.0])), settings())
    off = ~batch.tokens["response_mask"]
    assert off.any()
    assert not got.tokens["advantages"][off].any()
    assert not got.tokens["returns"][off].any()


# ---------------------------------------------------------------- filters


class HalfOfWhatIsLeft:
    """Drops the first trajectory that still trains."""

    def keep(self, trajectories: Table) -> np.ndarray:
        keep = trajectories["trains"].copy()
        keep[int(np.flatnonzero(keep)[0])] = False
        return keep


def test_without_filters_the_batch_stays_as_it_is() -> None:
    batch = three_tokens()
    assert filter_groups(batch, []) is batch


def test_filters_see_what_those_before_them_left_and_add_up() -> None:
    batch = batch_with_kl()
    odd = FakeGroupFilter(FakeFilterConfig(drop_even=True), FilterContext())
    kept = filter_groups(batch, [odd, HalfOfWhatIsLeft(), HalfOfWhatIsLeft()]).trajectories["trains"]
    group = batch.trajectories["group"]
    assert kept.tolist() == [bool(g % 2) and i not in np.flatnonzero(group % 2)[:2] for i, g in enumerate(group)]
    assert len(kept) == 12  # the others stay in the batch and in its metrics


def test_filtered_trajectories_have_no_advantage_and_do_not_count_in_whitening() -> None:
    batch = filter_groups(batch_with_kl(), [FakeGroupFilter(FakeFilterConfig(drop_even=True), FilterContext())])
    values = np.arange(1.0, len(batch.sampled) + 1)
    got = with_advantages(batch, Given(values), settings(whiten_advantages=True))
    odd = (batch.trajectories["group"][batch.tokens["trajectory"][batch.sampled]] % 2).astype(bool)
    kept = values[odd]
    expected = np.where(odd, (values - kept.mean()) / kept.std(ddof=1), 0.0)
    np.testing.assert_allclose(got.tokens["advantages"][batch.sampled], expected, atol=1e-6)
    assert not got.tokens["returns"][batch.sampled][~odd].any()
