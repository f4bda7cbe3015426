"""Tapered off-policy REINFORCE: good trajectories unweighted, bad ones under a truncated ratio (Le Roux et al. 2025,
arXiv 2503.14286)."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.contracts.loss import LossContext, LossView
from turnwise_losses.config import ToprConfig
from turnwise_losses.segments import ROUNDING


class ToprLoss:
    """L = −w⁺·A·lp on the tokens of a positive trajectory, −w⁻·sg(clip(ρ, 0, 1))·A·lp on those of a negative one.

    A trajectory is positive by its mean advantage ≥ 0, or with `topr_sign: score` by its score > 0. Both come from the
    pipeline, as the columns `trajectory_advantages` and `scores`: a micro-batch may not hold the whole trajectory.
    """

    def __init__(self, config: ToprConfig, context: LossContext | None = None) -> None:
        self.by_score = config.topr_sign == "score"
        self.positive, self.negative = config.topr_weight_pos, config.topr_weight_neg

    def loss(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R]; metrics `clip_frac` (1 where the bound changed the token's loss) and `topr_positive_frac`."""
        positive = view.extras["scores"] > 0 if self.by_score else view.extras["trajectory_advantages"] >= 0
        ratio = view.log_ratio.detach().exp()
        # Constant: the ratio's own gradient would turn the policy gradient into a surrogate.
        weight = torch.where(positive, self.positive, self.negative * ratio.clamp(0, 1))
        changed = ~positive & (ratio > 1 + ROUNDING) & (view.advantages != 0)
        metrics = {"clip_frac": changed.to(ratio.dtype), "topr_positive_frac": positive.to(ratio.dtype)}
        return -weight * view.advantages * view.log_probs, metrics
