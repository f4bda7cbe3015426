"""DPPO: a trust region on the sampler's and the current probability of the token, in place of a clipped ratio (arXiv
2602.04879)."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.contracts.loss import LossContext, LossView
from turnwise.data.numbers import LOG_RATIO_BOUND
from turnwise.errors import TrainerError
from turnwise_losses.config import DppoConfig


class DppoLoss:
    """L = −M·(p/q)·A, q the sampler's probability of the token, p the current one. M is 0 or 1 and carries no gradient.

    `binary_tv`: M = 0 where A > 0 and p − q > δ, or A < 0 and q − p > δ. `binary_kl`: M = 0 where the divergence of the
    two-way choice (this token or another), q·ln(q/p) + (1−q)·ln((1−q)/(1−p)), is over δ and p has moved to where A
    pushes it.
    """

    def __init__(self, config: DppoConfig, context: LossContext | None = None) -> None:
        self.kl = config.dppo_mask == "binary_kl"
        self.delta = config.delta

    def loss(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R]; metric `clip_frac`: 1 on the masked tokens. Raises TrainerError without the sampler's log-probs."""
        if view.infer_log_probs is None:
            raise TrainerError("pg_variant 'dppo' needs the sampler's log-probs, and it gave none for some tokens")
        log_ratio = (view.log_probs - view.infer_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        masked = self._outside(view.log_probs.detach(), view.infer_log_probs, view.advantages)
        loss = -log_ratio.exp() * view.advantages
        return torch.where(masked, 0.0, loss), {"clip_frac": masked.to(loss.dtype)}

    def _outside(self, log_p: Tensor, log_q: Tensor, advantages: Tensor) -> Tensor:
        p, q = log_p.exp(), log_q.exp()
        # Positive where p has moved to where A pushes it: only such a token may be masked.
        moved = (p - q) * advantages.sign()
        if not self.kl:
            return moved > self.delta
        least = torch.finfo(p.dtype).tiny
        # expm1 keeps the digits of 1 − p for p near 1, and the floor keeps a p of 1 from a logarithm of 0.
        other_p, other_q = (-torch.expm1(log_p)).clamp_min(least), (-torch.expm1(log_q)).clamp_min(least)
        divergence = q * (log_q - log_p) + other_q * (other_q.log() - other_p.log())
        return (moved > 0) & (divergence > self.delta)
