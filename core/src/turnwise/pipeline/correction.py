"""Train/infer correction: what the gap between the trainer's and the sampler's log-probs does to each token, once per
step over trajectories."""

from __future__ import annotations

import numpy as np

from turnwise.config.schema import CorrectionFilter, RunConfig, TrainInferCorrection
from turnwise.data.batch import Batch
from turnwise.data.numbers import LOG_RATIO_BOUND
from turnwise.data.ops import trains


def compared(batch: Batch) -> dict[str, float]:
    """Metrics of the gap between the trainer's and the sampler's log-probs, over the sampled tokens of the trajectories
    that train.

    Empty where there is nothing to compare: a token without a sampler's log-prob, or no pass of the trainer
    (`old_log_probs` NaN).
    """
    counted = trains(batch)[batch.tokens["trajectory"][batch.sampled]]
    if (
        not counted.any()
        or not batch.has_infer_log_probs
        or np.isnan(batch.tokens["old_log_probs"][batch.sampled]).any()
    ):
        return {}
    gap = Gap(batch)
    ratio, difference = gap.ratio("token")[counted], np.abs(gap.difference("token"))[counted]
    logs = np.abs(gap.trainer - gap.sampler)[counted]
    return {
        "correction/ratio/mean": float(ratio.mean()),
        "correction/ratio/max": float(ratio.max()),
        "correction/ratio/min": float(ratio.min()),
        "correction/prob_diff/mean": float(difference.mean()),
        "correction/prob_diff/max": float(difference.max()),
        "correction/log_prob_diff/mean": float(logs.mean()),
        "correction/log_prob_diff/max": float(logs.max()),
    }


def corrected(batch: Batch, config: RunConfig) -> tuple[Batch, dict[str, float]]:
    """The batch for the actor's updates, and the metrics of the correction; unchanged without one.

    Token columns: `policy_weight` float64, a factor of the policy loss alone (not of KL and entropy terms);
    `policy_keep` bool, false
    where a filter drops the token: its coef is 0 in every term, while the denominators count it. Needs `old_log_probs`
    from a pass of the trainer and, but for asynchronous training, a complete `infer_log_probs`.
    """
    correction = config.train_infer_correction
    if correction is None or not correction.active:
        return batch, {}
    if config.async_generation_ratio and not batch.has_infer_log_probs:
        # No ratio is known of them: the weight 1, and no filter drops them.
        infer, old = batch.tokens["infer_log_probs"], batch.tokens["old_log_probs"]
        batch = batch.with_tokens(infer_log_probs=np.where(np.isnan(infer), old, infer))
    gap = Gap(batch)
    weight, keep = np.ones(len(batch.sampled)), np.ones(len(batch.sampled), np.bool_)
    if correction.is_weight.enabled:
        bounds = correction.is_weight
        weight = np.clip(
            gap.ratio(bounds.weight_type),
            bounds.lower_bound or 0.0,
            np.inf if bounds.upper_bound is None else bounds.upper_bound,
        )
    for one in correction.filters:
        keep &= kept(gap, one)
    factors, kept_tokens = np.ones(len(batch.tokens)), np.ones(len(batch.tokens), np.bool_)
    factors[batch.sampled], kept_tokens[batch.sampled] = weight, keep
    counted = trains(batch)[batch.tokens["trajectory"][batch.sampled]]
    found = _metrics(gap, correction, weight, keep, counted)
    return batch.with_tokens(policy_weight=factors, policy_keep=kept_tokens), found


class Gap:
    """d = old − sampler's log-probs over the sampled tokens, and its aggregates; arrays float64 [R] along
    `batch.sampled`.

    `token`: the token's own. `segment`: mean over its turn. `geometric`: mean over its trajectory. `sequence`: sum over
    its trajectory.
    """

    def __init__(self, batch: Batch) -> None:
        self._labels = {
            "segment": batch.tokens["turn"][batch.sampled],
            "trajectory": batch.tokens["trajectory"][batch.sampled],
        }
        self.trainer = batch.tokens["old_log_probs"][batch.sampled].astype(np.float64)
        self.sampler = batch.tokens["infer_log_probs"][batch.sampled].astype(np.float64)

    def ratio(self, level: str) -> np.ndarray:
        """e^d at a level; the log-ratio is clamped to ±20."""
        return np.asarray(
            np.exp(np.clip(self._aggregate(self.trainer - self.sampler, level), -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        )

    def difference(self, level: str) -> np.ndarray:
        """The trainer's probability of each token minus the sampler's, aggregated at a level.

        In this order: the probability of a long sequence is 0 on both sides, and so is a difference taken after the
        sum.
        """
        return self._aggregate(np.exp(self.trainer) - np.exp(self.sampler), level)

    def _aggregate(self, values: np.ndarray, level: str) -> np.ndarray:
        if level == "token" or not len(values):
            return values
        labels = self._labels["segment" if level == "segment" else "trajectory"]
        total = np.bincount(labels, weights=values)[labels]
        return np.asarray(total if level == "sequence" else total / np.bincount(labels)[labels], np.float64)


def kept(gap: Gap, one: CorrectionFilter) -> np.ndarray:
    """bool [R]: the sampled tokens that a filter leaves, bounds inclusive."""
    keep = np.ones(len(gap.trainer), np.bool_)
    if one.enabled and one.ratio_enabled:
        ratio = gap.ratio(one.agg_type)
        keep &= (ratio >= one.ratio_low) & (ratio <= one.ratio_high)
    if one.enabled and one.diff_enabled:
        difference = gap.difference(one.agg_type)
        keep &= (difference >= one.diff_low) & (difference <= one.diff_high)
    return keep


def _metrics(
    gap: Gap, correction: TrainInferCorrection, weight: np.ndarray, keep: np.ndarray, counted: np.ndarray
) -> dict[str, float]:
    """Over the sampled tokens of the trajectories that train; nothing where there are none."""
    if not counted.any():
        return {}
    out: dict[str, float] = {}
    if correction.is_weight.enabled:
        changed = weight != gap.ratio(correction.is_weight.weight_type)
        out |= {
            "correction/weight/mean": float(weight[counted].mean()),
            "correction/weight/clip_frac": float(changed[counted].mean()),
        }
    if any(one.active for one in correction.filters):
        out["correction/filtered_frac"] = float(1 - keep[counted].mean())
    return out
