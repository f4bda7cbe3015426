"""From a batch to advantages: filters, the KL penalty in the reward, the estimator, whitening, mask, clip. In this
order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import evolve

from turnwise.config.schema import RunConfig
from turnwise.contracts.estimator import AdvantageEstimator
from turnwise.contracts.group_filter import GroupFilter
from turnwise.data.batch import Batch
from turnwise.data.numbers import LOG_RATIO_BOUND
from turnwise.data.ops import discounted_sums, last_sampled, trains, whiten
from turnwise.errors import PluginError, boundary


def kl_estimate(kind: str, log_probs: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Per-token KL estimate of π against the reference, float64. Log-ratios are clamped to ±20, results are not.

    k1 = lp − ref, abs, k2 = ½(lp − ref)², k3 = e^(ref − lp) − (ref − lp) − 1 (Schulman, "Approximating KL divergence").
    """
    # float64 before the subtraction: the columns are float32, and most differences are small.
    d: np.ndarray = np.clip(log_probs.astype(np.float64) - reference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if kind == "k1":
        return d
    if kind == "abs":
        return np.asarray(np.abs(d))
    # expm1 keeps the digits that exp(−d) − 1 loses near 0.
    return np.asarray(0.5 * d * d if kind == "k2" else np.expm1(-d) + d)


def filter_groups(batch: Batch, filters: Sequence[GroupFilter]) -> Batch:
    """Mark in the trajectory column `trains` which trajectories train; the others stay in the batch and its metrics."""
    if not filters:
        return batch
    keep = np.ones(len(batch.trajectories), np.bool_)
    for one in filters:
        # Each filter sees what those before it left.
        keep &= one.keep(batch.trajectories.with_columns(trains=keep))
    return batch.with_trajectories(trains=keep)


def add_kl_penalty(batch: Batch, config: RunConfig, beta: float) -> Batch:
    """Add the token column `kl_penalty` = β·kl(old, reference); with `kl_in_score`, take it from the scores instead.

    A score stays the sum of the trajectory's rewards: its last sampled token and that token's turn give what it loses.
    """
    mask = batch.tokens["response_mask"]
    kl = np.where(
        mask, kl_estimate(config.kl_penalty, batch.tokens["old_log_probs"], batch.tokens["ref_log_probs"]), 0.0
    )
    # Estimators of token rewards subtract it themselves (turnwise.data.normalise), the others' share is taken in
    # `with_advantages`.
    if not config.kl_in_score:
        return batch.with_tokens(kl_penalty=beta * kl)
    per_trajectory = np.bincount(batch.tokens["trajectory"], weights=kl, minlength=len(batch.trajectories))
    last = last_sampled(batch)
    ends, penalty = last[last >= 0], beta * per_trajectory[last >= 0]
    rewards, of_turns = batch.tokens["token_level_rewards"].copy(), batch.turns["reward"].copy()
    rewards[ends] -= penalty
    of_turns[batch.tokens["turn"][ends]] -= penalty
    batch = batch.with_trajectories(scores=batch.trajectories["scores"] - beta * per_trajectory).with_tokens(
        token_level_rewards=rewards
    )
    return evolve(batch, turns=batch.turns.with_columns(reward=of_turns))


def with_advantages(batch: Batch, estimator: AdvantageEstimator, config: RunConfig) -> Batch:
    """The batch with token columns `advantages` and `returns` (float64, zero off the mask)."""
    with boundary(f"adv_estimator {config.adv_estimator.name!r}", PluginError):
        advantages, returns = estimator.compute(batch)
    mask = batch.tokens["response_mask"]
    advantages = np.where(mask, advantages, 0.0)
    if "kl_penalty" in batch.tokens and not estimator.token_rewards:
        along = batch.sampled
        owner = batch.tokens["trajectory"][along]
        # A score estimator has no rewards per token to take the penalty from: its sum from each token on goes off here.
        advantages[along] -= discounted_sums(batch.tokens["kl_penalty"][along], owner, config.gamma)
    mask = mask & trains(batch)[batch.tokens["trajectory"]]
    # Before the batch is cut into updates: statistics are those of the step.
    if config.whiten_advantages if config.whiten_advantages is not None else estimator.whiten:
        advantages[mask] = whiten(advantages[mask])
    advantages = np.where(mask, advantages, 0.0)
    if config.advantage_clip is not None:
        advantages = np.clip(advantages, -config.advantage_clip, config.advantage_clip)
    return batch.with_tokens(advantages=advantages, returns=np.where(mask, returns, 0.0))


def mean_kl(batch: Batch, kind: str) -> tuple[float, int]:
    """Mean over trajectories of their token-mean KL against the reference, and how many trajectories have tokens."""
    mask = batch.tokens["response_mask"]
    owner = batch.tokens["trajectory"][mask]
    kl = kl_estimate(kind, batch.tokens["old_log_probs"], batch.tokens["ref_log_probs"])[mask]
    tokens = np.bincount(owner, minlength=len(batch.trajectories))
    total = np.bincount(owner, weights=kl, minlength=len(batch.trajectories))
    # Filtered trajectories count, too: β follows the policy, not what happens to train.
    has = tokens > 0
    return (float((total[has] / tokens[has]).mean()) if has.any() else float("nan")), int(has.sum())


def adapted(beta: float, kl: float, target: float, trajectories: int, horizon: float) -> float:
    """β·(1 + clip(kl/target − 1, ±0.2)·n/horizon), the adaptive coefficient of Ziegler et al. 2019 (arXiv
    1909.08593)."""
    return beta * (1 + float(np.clip(kl / target - 1, -0.2, 0.2)) * trajectories / horizon)
