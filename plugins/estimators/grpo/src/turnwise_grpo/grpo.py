"""GRPO: the score normalised in its group, on every sampled token of the trajectory (Shao et al. 2024, arXiv
2402.03300)."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.estimator import EstimatorCapabilities, EstimatorContext
from turnwise.data.batch import Batch
from turnwise.data.normalise import normalise_scores, settle
from turnwise.data.ops import trajectories_to_tokens
from turnwise_grpo.config import ScoreConfig


class Grpo:
    """A = (score − μ)/(σ + 1e-6) of the trajectory's group, in every row cut from the trajectory. No discount."""

    capabilities = EstimatorCapabilities(compares_in_groups=True)
    token_rewards: bool = False
    whiten: bool = False

    def __init__(self, config: ScoreConfig, context: EstimatorContext) -> None:
        self.normalization = settle(config.reward_normalization, method="mean_std")

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64 [T]; the returns are the advantages."""
        advantages = trajectories_to_tokens(batch, normalise_scores(batch, self.normalization))
        return advantages, advantages.copy()
