"""The metrics of asynchronous training: the age of tokens, their weights, and who waits."""

from __future__ import annotations

import time

import numpy as np
import pytest
from attrs import evolve

from turnwise.data.batch import Batch
from turnwise.pipeline import staleness
from turnwise.pipeline.clock import Clock
from turnwise.testing.synthetic import batch_of, row_per_turn, trajectories


def batch(versions: np.ndarray | int) -> Batch:
    made = batch_of(trajectories(2, 3), row_per_turn)
    column = np.full(len(made.tokens), -1, np.int32)
    column[made.sampled] = versions
    return made.with_tokens(versions=column)


def test_staleness_is_the_steps_number_minus_the_version_of_each_token() -> None:
    made = batch(3)
    ages = np.arange(len(made.sampled)) % 3
    turn = made.tokens["turn"][made.sampled]
    out = staleness.of_tokens(batch(5 - ages), 5)
    assert (out["async/staleness/mean"], out["async/staleness/max"]) == (pytest.approx(ages.mean()), 2)
    spans = [np.ptp(ages[turn == one]) for one in np.unique(turn)]
    assert out["async/version_span"] == max(spans)
    assert staleness.of_tokens(made, 3)["async/version_span"] == 0


def test_the_length_ratio_is_one_unless_a_filter_acts() -> None:
    made = batch(0)
    assert staleness.of_tokens(made, 0)["async/length_ratio"] == 1
    keep = np.arange(len(made.trajectories)) > 0
    owner = made.tokens["trajectory"][made.sampled]
    out = staleness.of_tokens(made.with_trajectories(trains=keep), 0)
    assert out["async/length_ratio"] == pytest.approx((owner > 0).mean()) == out[f"async/length_ratio/{made.tags[0]}"]


def test_the_effective_size_is_one_for_equal_weights_and_a_share_for_one_that_counts() -> None:
    made = batch(0)
    weight = np.full(len(made.tokens), 0.5)
    assert staleness.effective_size(made) == {}
    assert staleness.effective_size(made.with_tokens(policy_weight=weight)) == {"async/ess": pytest.approx(1)}
    weight[made.sampled[1:]] = 0
    only = staleness.effective_size(made.with_tokens(policy_weight=weight))
    assert only == {"async/ess": pytest.approx(1 / len(made.sampled))}


def test_the_sampler_is_idle_when_it_neither_plays_nor_evaluates() -> None:
    clock = Clock()
    with clock.phase("eval"):
        time.sleep(0.02)
    time.sleep(0.03)
    out = staleness.occupation({"async/groups/waiting": 1.0}, clock, worked=0.01)
    assert 0.02 <= out["time/sampler_idle"] <= clock.elapsed - 0.03
    assert out["async/groups/waiting"] == 1
    clock.take()
    assert clock.elapsed < 0.02


def test_an_evaluation_is_of_one_version() -> None:
    made = trajectories(2, 3)
    one = [
        evolve(t, turns=tuple(evolve(turn, versions=np.full_like(turn.versions, 4)) for turn in t.turns)) for t in made
    ]
    assert staleness.of_evaluation(one) == {"val/version_span": 0}
    newer = evolve(one[0], turns=tuple(evolve(turn, versions=turn.versions + 2) for turn in one[0].turns))
    assert staleness.of_evaluation([newer, *one]) == {"val/version_span": 2}
    assert staleness.of_evaluation([]) == {}
