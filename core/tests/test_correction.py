"""The train/infer correction against a slow reference: weights, filters, metrics, and what reaches the update."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from turnwise.config.schema import (
    Choice,
    CorrectionFilter,
    ImportanceWeight,
    ModelArgs,
    Role,
    RunConfig,
    TrainInferCorrection,
)
from turnwise.contracts.batch_adjust import PlannedUpdate
from turnwise.contracts.loss import LossCapabilities
from turnwise.data.batch import Batch
from turnwise.errors import ConfigError
from turnwise.pipeline.correction import Gap, compared, corrected
from turnwise.pipeline.old_logprobs import OldLogProbs
from turnwise.pipeline.updates import updates
from turnwise.testing.runs import one_step
from turnwise.testing.synthetic import batch_of, one_row, row_per_turn, trajectories

LEVELS = ("token", "segment", "geometric", "sequence")


FP32 = Role(model_args=ModelArgs(dtype="fp32"))


def settings(weight: ImportanceWeight | None = None, *filters: CorrectionFilter, **changes: Any) -> RunConfig:
    return one_step(
        rollout_batch_size=12,
        train_infer_correction=TrainInferCorrection(weight or ImportanceWeight(), filters),
        **changes,
    )


def gapped(seed: int = 0, cut: Any = row_per_turn, spread: float = 0.3) -> Batch:
    """A batch whose old log-probs differ from the sampler's by a few tenths."""
    batch = batch_of(trajectories(4, 3), cut)
    ids = batch.tokens["input_ids"][batch.sampled]
    noise = np.random.default_rng(seed).normal(0, spread, 64)[
        ids % 64
    ]  # by token id: the same however the rows are cut
    old = np.zeros(len(batch.tokens), np.float32)
    old[batch.sampled] = np.minimum(batch.tokens["infer_log_probs"][batch.sampled] + noise, -1e-3)
    return batch.with_tokens(old_log_probs=old, advantages=batch.tokens["response_mask"].astype(float))


def slow(batch: Batch, level: str) -> tuple[list[float], list[float]]:
    """(ratio, difference of probabilities) of each sampled token, by loops over the definition."""
    rows = [(int(batch.tokens["turn"][t]), int(batch.tokens["trajectory"][t]), float(batch.tokens["old_log_probs"][t]),
             float(batch.tokens["infer_log_probs"][t])) for t in batch.sampled]  # fmt: skip
    ratios, differences = [], []
    for turn, trajectory, old, infer in rows:
        mine = {"token": [(0, 0, old, infer)], "segment": [r for r in rows if r[0] == turn]}.get(
            level, [r for r in rows if r[1] == trajectory]
        )
        share = 1 if level == "sequence" else len(mine)
        ours, theirs = sum(r[2] for r in mine) / share, sum(r[3] for r in mine) / share
        ratios.append(math.exp(max(-20, min(20, ours - theirs))))
        differences.append(sum(math.exp(r[2]) - math.exp(r[3]) for r in mine) / share)
    return ratios, differences


def columns(batch: Batch, config: RunConfig) -> tuple[np.ndarray, np.ndarray]:
    """(weight, kept) of the sampled tokens; on the other tokens both are neutral."""
    done, _ = corrected(batch, config)
    off = ~batch.tokens["response_mask"]
    assert (done.tokens["policy_weight"][off] == 1).all()
    assert done.tokens["policy_keep"][off].all()
    return done.tokens["policy_weight"][batch.sampled], done.tokens["policy_keep"][batch.sampled]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.2), (0.9, None), (None, None)])
def test_the_weight_is_the_clipped_ratio_at_its_level(level: Any, low: float | None, high: float | None) -> None:
    batch = gapped()
    weight, keep = columns(batch, settings(ImportanceWeight(True, level, low, high)))
    expected = np.clip(slow(batch, level)[0], low or 0.0, math.inf if high is None else high)
    np.testing.assert_allclose(weight, expected, rtol=1e-6)
    assert keep.all()


def test_differences_are_of_tokens_probabilities_and_aggregated_afterwards() -> None:
    batch = gapped()
    half, third = np.full(len(batch.tokens), math.log(0.5)), np.full(len(batch.tokens), math.log(0.3))
    gap = Gap(batch.with_tokens(old_log_probs=half, infer_log_probs=third))
    owner = batch.tokens["trajectory"][batch.sampled]
    for level in ("token", "segment", "geometric"):
        np.testing.assert_allclose(gap.difference(level), 0.2, rtol=1e-12)
    np.testing.assert_allclose(
        gap.difference("sequence"), 0.2 * np.bincount(owner)[owner], rtol=1e-12
    )  # two tokens: .4


@examples(max_examples=40)
@given(
    level=st.sampled_from(LEVELS),
    seed=st.integers(0, 9),
    low=st.floats(0.5, 1.1),
    width=st.floats(0, 1),
    down=st.floats(-0.3, 0.0),
    up=st.floats(0, 0.3),
)
def test_filters_keep_what_lies_within_their_bounds_and_multiply(
    level: Any, seed: int, low: float, width: float, down: float, up: float
) -> None:
    batch = gapped(seed)
    ratios, differences = slow(batch, level)
    by_ratio = CorrectionFilter(agg_type=level, ratio_enabled=True, ratio_low=low, ratio_high=low + width)
    by_both = CorrectionFilter(
        agg_type=level,
        ratio_enabled=True,
        ratio_low=0.7,
        ratio_high=2.0,
        diff_enabled=True,
        diff_low=down,
        diff_high=up,
    )
    off = CorrectionFilter(enabled=False, ratio_enabled=True, ratio_low=9, ratio_high=9)
    expected = [low <= r <= low + width and 0.7 <= r <= 2.0 and down <= d <= up for r, d in zip(ratios, differences)]
    near = [
        min(abs(r - x) for x in (low, low + width, 0.7, 2.0)) < 1e-9 or min(abs(d - x) for x in (down, up)) < 1e-9
        for r, d in zip(ratios, differences)
    ]
    weight, keep = columns(batch, settings(None, by_ratio, by_both, off))
    assert [bool(k) for k, n in zip(keep, near) if not n] == [e for e, n in zip(expected, near) if not n]
    assert (weight == 1).all()


def test_bounds_are_inclusive() -> None:
    batch = gapped()
    batch = batch.with_tokens(old_log_probs=batch.tokens["infer_log_probs"])  # every ratio is 1, every difference 0
    edges = CorrectionFilter(
        ratio_enabled=True, ratio_low=1.0, ratio_high=1.0, diff_enabled=True, diff_low=0.0, diff_high=0.0
    )
    assert columns(batch, settings(None, edges))[1].all()
    assert not columns(batch, settings(None, CorrectionFilter(ratio_enabled=True, ratio_low=1.01, ratio_high=2)))[
        1
    ].any()


@pytest.mark.parametrize("level", LEVELS)
def test_rows_of_any_cut_get_the_same_correction(level: Any) -> None:
    config = settings(ImportanceWeight(True, level), CorrectionFilter(agg_type=level, ratio_enabled=True))
    whole, cut = (columns(gapped(cut=how), config) for how in (one_row, row_per_turn))
    np.testing.assert_allclose(whole[0], cut[0], rtol=1e-12)
    np.testing.assert_array_equal(whole[1], cut[1])


def test_a_sequence_far_off_is_finite() -> None:
    batch = gapped()
    old = np.where(batch.tokens["response_mask"], np.float32(-90), np.float32(0))
    for far in (
        batch.with_tokens(old_log_probs=old),
        batch.with_tokens(old_log_probs=batch.tokens["infer_log_probs"], infer_log_probs=old),
    ):
        weight, _ = columns(
            far,
            settings(
                ImportanceWeight(True, "sequence", None, None), CorrectionFilter(agg_type="sequence", diff_enabled=True)
            ),
        )
        assert np.isfinite(weight).all()


def test_filtered_tokens_have_coef_zero_and_stay_in_the_denominator() -> None:
    batch = gapped()
    config = settings(ImportanceWeight(True), CorrectionFilter(ratio_enabled=True))
    planned = [PlannedUpdate(np.arange(len(batch.samples)), np.ones(len(batch.samples)))]
    done, found = corrected(batch, config)
    (plain,) = updates(batch, planned, config, Role(), 0, 0.0)
    (update,) = updates(done, planned, config, Role(), 0, 0.0)
    keep = done.tokens["policy_keep"][batch.tokens["response_mask"]]
    assert 0 < keep.sum() < len(keep)
    np.testing.assert_array_equal(update.rows.columns["coef"], np.where(keep, plain.rows.columns["coef"], 0))
    np.testing.assert_array_equal(update.rows.columns["coef"][keep], 1 / len(keep))
    np.testing.assert_array_equal(update.rows.columns["weight"], plain.rows.columns["weight"])
    np.testing.assert_array_equal(
        update.rows.columns["policy_weight"], done.tokens["policy_weight"][batch.tokens["response_mask"]]
    )
    assert found["correction/filtered_frac"] == pytest.approx(1 - keep.mean())


def test_metrics_are_over_the_tokens_that_train() -> None:
    batch = gapped()
    trains = batch.trajectories["group"] != 1
    _, found = corrected(batch.with_trajectories(trains=trains), settings(ImportanceWeight(True, upper_bound=1.1)))
    counted = trains[batch.tokens["trajectory"][batch.sampled]]
    ratios, differences = (np.array(x)[counted] for x in slow(batch, "token"))
    assert compared(batch.with_trajectories(trains=trains)) | found == pytest.approx({
        "correction/log_prob_diff/mean": np.abs(np.log(ratios)).mean(), "correction/log_prob_diff/max": np.abs(np.log(ratios)).max(),
        "correction/ratio/mean": ratios.mean(), "correction/ratio/max": ratios.max(), "correction/ratio/min": ratios.min(),
        "correction/prob_diff/mean": np.abs(differences).mean(), "correction/prob_diff/max": np.abs(differences).max(),
        "correction/weight/mean": np.minimum(ratios, 1.1).mean(), "correction/weight/clip_frac": (ratios > 1.1).mean(),
    }, rel=1e-6)  # fmt: skip


def test_without_a_correction_nothing_happens() -> None:
    batch = gapped()
    for config in (settings(), settings(None, CorrectionFilter(), CorrectionFilter(enabled=False, ratio_enabled=True))):
        assert corrected(batch, config) == (batch, {})
    nothing = batch_of([t for t in trajectories(2, 3) if not t.turns]).with_tokens(
        old_log_probs=np.zeros(0, np.float32)
    )
    assert corrected(nothing, settings(ImportanceWeight(True)))[1] == {}


# ---------------------------------------------------------------- where old log-probs come from


class Untouched:
    async def call(self, method: str, rows: Any) -> np.ndarray:
        raise AssertionError("nothing is to be computed")


ON = ImportanceWeight(True)


def test_a_correction_reads_old_log_probs_so_they_are_recomputed_even_for_one_update() -> None:
    assert OldLogProbs(settings(ON), shared=False).choose(gapped(), 1, 0) == "recompute"
    assert OldLogProbs(settings(), shared=False).choose(gapped(), 1, 0) == "detached"
    assert OldLogProbs(settings(ON, recompute_old_logprobs="true"), shared=True).choose(gapped(), 1, 0) == "recompute"


def test_old_log_probs_that_are_the_samplers_leave_nothing_to_correct() -> None:
    with pytest.raises(
        ConfigError, match=r"^train_infer_correction compares old log-probs .* Fix: recompute_old_logprobs: true"
    ):
        asyncio.run(
            OldLogProbs(settings(ON, actor_train=FP32), shared=True).add(gapped(), Untouched(), updates=1, version=0)
        )


class NeedsSampler:
    capabilities = LossCapabilities(needs_infer_log_probs=True)


@pytest.mark.parametrize(
    ("config", "start"),
    [
        (settings(ON, recompute_old_logprobs="true"), "train_infer_correction needs the sampler's log-probs"),
        (settings(pg_variant=Choice("dppo", {}, NeedsSampler())), "pg_variant: dppo needs the sampler's log-probs"),
    ],
    ids=["correction", "loss"],
)
def test_what_needs_the_sampler_is_refused_without_its_log_probs(config: RunConfig, start: str) -> None:
    batch = gapped()
    infer = batch.tokens["infer_log_probs"].copy()
    infer[batch.sampled[3]] = np.nan
    with pytest.raises(ConfigError, match=f"^{start}, and it gave none for some tokens"):
        OldLogProbs(config, shared=False).choose(batch.with_tokens(infer_log_probs=infer), 2, 0)
    assert OldLogProbs(config, shared=False).choose(batch, 2, 0) == "recompute"
