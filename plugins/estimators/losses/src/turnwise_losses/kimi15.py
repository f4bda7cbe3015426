"""Kimi k1.5's surrogate: the policy gradient with a quadratic pull to the old policy in place of a ratio (arXiv
2501.12599)."""

from __future__ import annotations

from torch import Tensor

from turnwise.contracts.loss import LossContext, LossView
from turnwise_losses.config import Kimi15Config


class Kimi15Loss:
    """L = −A·lp + (τ/2)·(lp − lp_old)². The square is of the token's own difference, whatever `ratio_type` says."""

    def __init__(self, config: Kimi15Config, context: LossContext | None = None) -> None:
        self.tau = config.kimi15_tau

    def loss(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R], no metrics."""
        # The square is not clamped: it is what pulls a token back that has gone far.
        return -view.advantages * view.log_probs + self.tau / 2 * (view.log_probs - view.old_log_probs).square(), {}
