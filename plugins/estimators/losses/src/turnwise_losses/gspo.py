"""GSPO: the clipped surrogate on the ratio of a whole response (Zheng et al. 2025, arXiv 2507.18071, its token
form)."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.contracts.loss import LossContext, LossView
from turnwise_losses.config import GspoConfig
from turnwise_losses.segments import segment_means, segments_of, token_log_ratio


class GspoLoss:
    """L = −min(sA, clip(s, 1−low, 1+high)·A), s = exp(sg(mean of d over the segment) + lp − sg(lp)).

    A segment is a turn; `gspo_level: sample` takes a row, as frameworks do that know only rows.
    """

    def __init__(self, config: GspoConfig, context: LossContext | None = None) -> None:
        self.bounds = 1 - config.gspo_clip_low, 1 + config.gspo_clip_high
        self.level = config.gspo_level

    def loss(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R]; metric `clip_frac`: 1 where a bound changed the token's loss."""
        # From the tokens' own differences: `view.log_ratio` may be of segments already.
        mean = segment_means(token_log_ratio(view).detach(), segments_of(view, self.level))
        # The segment's ratio by value, the token's own log-prob by gradient.
        ratio = (mean + view.log_probs - view.log_probs.detach()).exp()
        plain = -ratio * view.advantages
        loss = torch.maximum(plain, -ratio.clamp(*self.bounds) * view.advantages)
        return loss, {"clip_frac": (loss != plain).detach().to(loss.dtype)}
