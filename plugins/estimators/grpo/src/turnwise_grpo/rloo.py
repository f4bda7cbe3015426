"""RLOO: the score minus the mean score of the others in its group (Ahmadian et al. 2024, arXiv 2402.14740)."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.estimator import EstimatorContext
from turnwise.data.batch import Batch
from turnwise.data.normalise import normalise, normalise_scores, settle
from turnwise.data.ops import trains, trajectories_to_tokens
from turnwise_grpo.config import ScoreConfig


class Rloo:
    """A_i = s_i − mean of s_j, j ≠ i in the group, on every sampled token; a group of one gives 0.

    Computed as n/(n−1)·(s_i − group mean), which is the same number.
    """

    needs: frozenset[str] = frozenset()
    token_rewards: bool = False
    compares_in_groups: bool = True
    whiten: bool = False

    def __init__(self, config: ScoreConfig, context: EstimatorContext) -> None:
        self.normalization = settle(config.reward_normalization, method="identity")

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64 [T]; the returns are the advantages."""
        scores = normalise_scores(batch, self.normalization)
        group = batch.trajectories["traj_group_id"]
        centred = normalise(scores, group, "mean", counted=trains(batch))
        _, where = np.unique(group, return_inverse=True)
        members = np.bincount(where, weights=trains(batch))[where]
        advantages = trajectories_to_tokens(batch, centred * members / np.maximum(members - 1.0, 1.0))
        return advantages, advantages.copy()
