"""PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347) with two bounds and the dual clip (Ye et al. 2020,
arXiv 1912.09729)."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.contracts.loss import LossContext, LossView
from turnwise_losses.config import PpoConfig


class PpoLoss:
    """L = −min(ρA, clip(ρ, 1−low, 1+high)·A); with the dual clip, L = min(L, c·|A|) where A < 0."""

    def __init__(self, config: PpoConfig, context: LossContext | None = None) -> None:
        self.low = config.pg_clip if config.pg_clip_low is None else config.pg_clip_low
        self.high = config.pg_clip if config.pg_clip_high is None else config.pg_clip_high
        # verl and SkyRL take 3, whatever the clip.
        default_c = 1 + 2 * config.pg_clip
        self.dual_c = (
            (default_c if config.dual_clip_c is None else config.dual_clip_c) if config.dual_clip_loss else None
        )

    def loss(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R]; metric `clip_frac`: 1 where one of the clips changed the token's loss, else 0."""
        ratio, advantages = view.log_ratio.exp(), view.advantages
        plain = -ratio * advantages
        # −min(a, b) is max(−a, −b).
        loss = torch.maximum(plain, -ratio.clamp(1 - self.low, 1 + self.high) * advantages)
        # Where A < 0 the clipped surrogate still grows with ρ without bound; this ends it at c·|A|.
        if self.dual_c is not None:
            loss = torch.where(advantages < 0, torch.minimum(loss, -self.dual_c * advantages), loss)
        return loss, {"clip_frac": (loss != plain).detach().to(loss.dtype)}
