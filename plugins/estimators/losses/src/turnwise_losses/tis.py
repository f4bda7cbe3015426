"""Truncated importance sampling: the policy gradient under a bounded, constant ratio (Espeholt et al. 2018, arXiv
1802.01561)."""

from __future__ import annotations

from torch import Tensor

from turnwise.contracts.loss import LossContext, LossView
from turnwise_losses.config import TisConfig
from turnwise_losses.segments import ROUNDING


class TisLoss:
    """L = −sg(clip(ρ, lower, upper))·A·lp."""

    def __init__(self, config: TisConfig, context: LossContext | None = None) -> None:
        self.bounds = config.tis_lower_bound, config.tis_upper_bound

    def loss(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R]; metric `clip_frac`: 1 where a bound changed the token's loss."""
        ratio = view.log_ratio.detach().exp()
        weight = ratio.clamp(*self.bounds)
        # On-policy ratios are 1 up to rounding and the upper bound is 1: compared exactly, they would count as clipped.
        changed = ((weight - ratio).abs() > ROUNDING) & (view.advantages != 0)
        return -weight * view.advantages * view.log_probs, {"clip_frac": changed.to(ratio.dtype)}
