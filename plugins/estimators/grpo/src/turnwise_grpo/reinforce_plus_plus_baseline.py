"""REINFORCE++-baseline: the score minus its group's mean, whitened over all sampled tokens of the step (arXiv
2501.03262)."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.estimator import EstimatorCapabilities, EstimatorContext
from turnwise.data.batch import Batch
from turnwise.data.normalise import normalise, normalise_scores, settle
from turnwise.data.ops import trains, trajectories_to_tokens
from turnwise_grpo.config import ScoreConfig


class ReinforcePlusPlusBaseline:
    """A = score − mean of the trajectory's group, on every sampled token; the pipeline then whitens A (`whiten`)."""

    capabilities = EstimatorCapabilities(compares_in_groups=True)
    token_rewards: bool = False
    whiten: bool = True

    def __init__(self, config: ScoreConfig, context: EstimatorContext) -> None:
        # None by default: the group's mean is taken off below, and σ by whitening.
        self.normalization = settle(config.reward_normalization, method="identity")

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages before whitening, returns), float64 [T]; the returns are the unwhitened advantages."""
        scores = normalise_scores(batch, self.normalization)
        centred = normalise(scores, batch.trajectories["traj_group_id"], "mean", counted=trains(batch))
        advantages = trajectories_to_tokens(batch, centred)
        return advantages, advantages.copy()
