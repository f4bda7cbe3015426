"""SAPO: a sigmoid gate on the ratio in place of a hard clip (Gao et al. 2025, arXiv 2511.20347)."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.contracts.loss import LossContext, LossView
from turnwise_losses.config import SapoConfig


class SapoLoss:
    """L = −(4/τ)·sigmoid(τ(ρ−1))·A, with one τ where A > 0 and another elsewhere: at ρ = 1 the gradient is the policy
    gradient's."""

    def __init__(self, config: SapoConfig, context: LossContext | None = None) -> None:
        self.positive, self.negative = config.sapo_tau_pos, config.sapo_tau_neg

    def loss(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R], no metrics."""
        ratio, advantages = view.log_ratio.exp(), view.advantages
        # 4/τ below makes up for the sigmoid's slope of τ/4 at 0.
        tau = torch.where(advantages > 0, ratio.new_tensor(self.positive), ratio.new_tensor(self.negative))
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, {}
