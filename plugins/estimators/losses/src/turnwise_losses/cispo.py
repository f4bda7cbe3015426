"""CISPO: clip the importance weight, not the update, so that every token keeps a gradient (MiniMax 2025, arXiv
2506.13585)."""

from __future__ import annotations

from torch import Tensor

from turnwise.contracts.loss import LossContext, LossView
from turnwise_losses.config import CispoConfig


class CispoLoss:
    """L = −sg(clip(ρ, 1−low, 1+high))·A·lp."""

    def __init__(self, config: CispoConfig, context: LossContext | None = None) -> None:
        self.bounds = 1 - config.cispo_epsilon_low, 1 + config.cispo_epsilon_high

    def loss(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R]; metric `clip_frac`: 1 where a bound changed the token's loss."""
        ratio = view.log_ratio.detach().exp()
        weight = ratio.clamp(*self.bounds)
        # Compared exactly, unlike in tis: by default no bound is near the ratio of 1 that on-policy tokens have.
        changed = (weight != ratio) & (view.advantages != 0)
        return -weight * view.advantages * view.log_probs, {"clip_frac": changed.to(ratio.dtype)}
