"""REINFORCE: the discounted return of each sampled token (Williams 1992)."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.estimator import EstimatorContext
from turnwise.data.batch import Batch
from turnwise.data.normalise import normalised_token_rewards, settle
from turnwise.data.ops import discounted_sums, sampled_to_tokens
from turnwise_grpo.config import ReturnConfig


class Reinforce:
    """A_t = G_t = r_t + γ·G_{t+1} over the trajectory's sampled tokens; observations are skipped, not discounted
    through."""

    token_rewards: bool = True
    whiten: bool = False

    def __init__(self, config: ReturnConfig, context: EstimatorContext) -> None:
        self.gamma = config.gamma
        self.normalization = settle(config.reward_normalization, method="identity")

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64 [T]; the advantages are the returns."""
        rewards = normalised_token_rewards(batch, self.normalization)[batch.sampled]
        # Along sampled tokens alone, so that neither observations nor the cut into rows count.
        returns = sampled_to_tokens(
            batch, discounted_sums(rewards, batch.tokens["trajectory"][batch.sampled], self.gamma)
        )
        return returns.copy(), returns
