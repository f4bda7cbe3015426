"""REINFORCE++: discounted returns, whitened over all sampled tokens of the step (Hu et al. 2025, arXiv 2501.03262)."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.estimator import EstimatorContext
from turnwise.data.batch import Batch
from turnwise.data.normalise import normalised_token_rewards, settle
from turnwise.data.ops import discounted_sums, sampled_to_tokens
from turnwise_grpo.config import ReturnConfig


class ReinforcePlusPlus:
    """A_t = G_t = r_t + γ·G_{t+1} over the trajectory's sampled tokens; the pipeline then whitens A (`whiten`), G is
    stored before it."""

    token_rewards: bool = True
    whiten: bool = True

    def __init__(self, config: ReturnConfig, context: EstimatorContext) -> None:
        self.gamma = config.gamma
        self.normalization = settle(config.reward_normalization, method="identity")

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages before whitening, returns), float64 [T]."""
        rewards = normalised_token_rewards(batch, self.normalization)[batch.sampled]
        returns = sampled_to_tokens(
            batch, discounted_sums(rewards, batch.tokens["trajectory"][batch.sampled], self.gamma)
        )
        return returns.copy(), returns
