"""GMPO: the geometric mean of a segment's clipped ratios in place of their arithmetic mean (Zhao et al. 2025, arXiv
2507.20673)."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.contracts.loss import LossContext, LossView
from turnwise_losses.config import GmpoConfig
from turnwise_losses.segments import segment_means, segments_of, token_log_ratio


class GmpoLoss:
    """L = −A·exp(mean of c over the segment) on each token of a segment, A the segment's mean advantage.

    c = g·min(g·d, g·clip(d, ±clip)), g = sign(A): the log-ratio, bounded where A would push it further. The gradient
    runs through the mean.
    """

    def __init__(self, config: GmpoConfig, context: LossContext | None = None) -> None:
        self.clip = config.gmpo_clip

    def loss(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R]; metric `clip_frac`: 1 on the tokens whose log-ratio was bounded."""
        segment = segments_of(view)
        # One A for the segment: its sign decides on which side every token's log-ratio is bounded.
        advantages = segment_means(view.advantages, segment)
        sign = advantages.sign()
        d = token_log_ratio(view)
        bounded = sign * torch.minimum(sign * d, sign * d.clamp(-self.clip, self.clip))
        # Where A = 0 there is no side to bound, and no loss to change.
        changed = (bounded != d).detach() & (sign != 0)
        return -advantages * segment_means(bounded, segment).exp(), {"clip_frac": changed.to(d.dtype)}
