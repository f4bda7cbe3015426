"""RLOO: the score minus the mean score of the others in its group (Ahmadian et al. 2024, arXiv 2402.14740)."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.estimator import EstimatorCapabilities, EstimatorContext
from turnwise.data.batch import Batch
from turnwise.data.normalise import normalise, normalise_scores, settle
from turnwise.data.ops import trains, trajectories_to_tokens
from turnwise_grpo.config import ScoreConfig


class Rloo:
    """A_i = s_i − mean of s_j, j ≠ i in the group, on every sampled token; a group of one gives 0.

    Computed as n/(n−1)·(s_i − group mean), which is the same number.
    """

    capabilities = EstimatorCapabilities(compares_in_groups=True)
    token_rewards: bool = False
    whiten: bool = False

    def __init__(self, config: ScoreConfig, context: EstimatorContext) -> None:
        # None by default: the mean of the others is the normalisation.
        self.normalization = settle(config.reward_normalization, method="identity")

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64 [T]; the returns are the advantages."""
        scores = normalise_scores(batch, self.normalization)
        group = batch.trajectories["traj_group_id"]
        centred = normalise(scores, group, "mean", counted=trains(batch))
        _, where = np.unique(group, return_inverse=True)
        # Failed and filtered members do not count: neither in the mean nor in n.
        members = np.bincount(where, weights=trains(batch))[where]
        # A group of one has 0 already; the divisor is held at 1 so that it does not become NaN.
        advantages = trajectories_to_tokens(batch, centred * members / np.maximum(members - 1.0, 1.0))
        return advantages, advantages.copy()
