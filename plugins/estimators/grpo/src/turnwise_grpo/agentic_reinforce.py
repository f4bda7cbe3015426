"""REINFORCE over segments: the rewards of a turn's sampled tokens and the discounted return of the next turn's, on all
of its tokens."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.estimator import EstimatorContext
from turnwise.data.batch import Batch
from turnwise.data.normalise import normalised_token_rewards, settle
from turnwise.data.ops import discounted_sums, run_ends, run_starts, sampled_to_tokens
from turnwise_grpo.config import ReturnConfig


class AgenticReinforce:
    """A = G_k = Σ of the token rewards in segment k + γ·G_{k+1}, one value per segment (the sampled tokens of one
    turn).

    γ discounts from segment to segment, not from token to token. A KL penalty in the reward is part of the token
    rewards.
    """

    token_rewards: bool = True
    whiten: bool = False

    def __init__(self, config: ReturnConfig, context: EstimatorContext) -> None:
        self.gamma = config.gamma
        self.normalization = settle(config.reward_normalization, method="identity")

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64 [T]; the advantages are the returns."""
        along = batch.sampled
        rewards, turn = normalised_token_rewards(batch, self.normalization)[along], batch.tokens["turn"][along]
        starts = run_starts(turn)
        # Every reward of the segment counts; ROLL takes that of its last token alone.
        sums = np.add.reduceat(rewards, starts) if len(starts) else np.zeros(0)
        # Discounted over segments: γ acts once from turn to turn, however many tokens a turn has.
        segments = discounted_sums(sums, batch.tokens["trajectory"][along][starts], self.gamma)
        returns = sampled_to_tokens(batch, np.repeat(segments, run_ends(turn) - starts))
        return returns.copy(), returns
