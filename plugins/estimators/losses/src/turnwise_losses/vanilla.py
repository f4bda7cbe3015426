"""The policy gradient itself (Williams 1992): minus advantage times log-prob, on whatever policy sampled the tokens."""

from __future__ import annotations

from torch import Tensor

from turnwise.contracts.loss import LossContext, LossView
from turnwise_losses.config import VanillaConfig


class VanillaLoss:
    """L = −A·lp."""

    def __init__(self, config: VanillaConfig | None = None, context: LossContext | None = None) -> None:
        pass

    def loss(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R], no metrics."""
        return -view.advantages * view.log_probs, {}
