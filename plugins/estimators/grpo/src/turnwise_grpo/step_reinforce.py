"""REINFORCE over turns: each turn's discounted return, normalised over turns, on the turn's sampled tokens."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.estimator import EstimatorCapabilities, EstimatorContext
from turnwise.data.batch import Batch
from turnwise.data.normalise import normalise_turns, settle
from turnwise.data.ops import discounted_sums, turns_to_tokens
from turnwise_grpo.config import StepConfig


class StepReinforce:
    """A = R_t normalised over turns, R_t = r_t + γ·R_{t+1} over the trajectory's turns, those without sampled tokens
    included."""

    # The turns of one trajectory are compared too.
    capabilities = EstimatorCapabilities(compares_in_groups=False)
    token_rewards: bool = False
    whiten: bool = False

    def __init__(self, config: StepConfig, context: EstimatorContext) -> None:
        self.gamma = config.step_reward_gamma
        self.normalization = settle(config.reward_normalization, method="mean", unit="turn")

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64 [T]; the returns are R_t before normalisation."""
        returns = discounted_sums(batch.turns["reward"], batch.turns["trajectory"], self.gamma)
        advantages = normalise_turns(batch, returns, self.normalization)
        # The returns as they are: metrics show what was earned.
        return turns_to_tokens(batch, advantages), turns_to_tokens(batch, returns)
