"""GAE: exponentially weighted sums of temporal differences over a trajectory's sampled tokens (Schulman et al. 2016,
arXiv 1506.02438)."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.estimator import EstimatorCapabilities, EstimatorContext
from turnwise.data.batch import Batch
from turnwise.data.normalise import normalised_token_rewards, settle
from turnwise.data.ops import discounted_sums, run_ends, sampled_to_tokens
from turnwise_gae.config import GaeConfig


class Gae:
    """A_t = Σ (γλ)^l δ_{t+l}, δ_t = r_t + γ·V_{t+1} − V_t; the returns, which the critic learns, are A + V.

    V_t is the critic's value of the prefix before token t (token column `values`). The next token of a turn's last one
    is the first sampled token of the next turn that has one, whatever rows the trajectory was cut into; after the
    trajectory's last sampled token V = 0, for terminated and truncated alike.
    """

    capabilities = EstimatorCapabilities(needs=frozenset({"values"}))
    token_rewards: bool = True
    whiten: bool = False

    def __init__(self, config: GaeConfig, context: EstimatorContext) -> None:
        self.gamma, self.lambd = config.gamma, config.lambd
        self.normalization = settle(config.reward_normalization, method="identity")

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64 [T]."""
        # Sampled tokens alone, turn after turn: what rows a trajectory was cut into must not change its advantages.
        along = batch.sampled
        owner = batch.tokens["trajectory"][along]
        values = batch.tokens["values"][along].astype(np.float64)
        # The slice keeps a batch without sampled tokens empty, for which the appended 0 is one too many.
        following = np.append(values[1:], 0.0)[: len(values)]
        # Else the value after a trajectory's last token would be that of the next trajectory's first.
        following[run_ends(owner) - 1] = 0.0
        deltas = normalised_token_rewards(batch, self.normalization)[along] + self.gamma * following - values
        # A sum of temporal differences discounted by γλ is a return with another discount.
        advantages = discounted_sums(deltas, owner, self.gamma * self.lambd)
        return sampled_to_tokens(batch, advantages), sampled_to_tokens(batch, advantages + values)
