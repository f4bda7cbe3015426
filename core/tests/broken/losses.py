"""Policy losses that break their contract in one way each; test_testing_kit.py says which contract tests must notice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from turnwise import Implementation, hookimpl
from turnwise.contracts.loss import LossCapabilities, LossView
from turnwise.testing.fakes import (
    FakeLoss,
)


class MeanLoss(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return super().loss(view)[0].mean(), {}


class MetricWithGradient(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return super().loss(view)[0], {"policy/log_prob": view.log_probs * 1}


class UsesTheEntropy(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return super().loss(view)[0] - view.entropy, {}


class WeighsByPosition(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        loss = super().loss(view)[0]
        return loss * loss.new_ones(len(loss)).cumsum(0), {}


class Explodes(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return -view.advantages * (5 * (view.log_probs - view.old_log_probs)).exp(), {}


class CentresOverTheView(FakeLoss):
    """Its gradient depends on how an update is cut into micro-batches."""

    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return super().loss(evolve(view, advantages=view.advantages - view.advantages.mean()))


class DropsTheFirstToken(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        loss = super().loss(view)[0]
        first = view.sample.diff(prepend=view.sample[:1] - 1) != 0
        return loss.masked_fill(first, 0.0), {}


class FlipsTheSign(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return -super().loss(view)[0], {}


class DeniesItsRatio(FakeLoss):
    capabilities = LossCapabilities(uses_ratio=False)

    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return -view.advantages * view.log_ratio.exp(), {}


class ClaimsARatio(FakeLoss):
    """Its value knows the old policy, its gradient does not."""

    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return -view.advantages * view.log_ratio, {}


class TakesItsOwnRatio(FakeLoss):
    """`ratio_type` has no effect on it, and it does not say so."""

    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return -view.advantages * (view.log_probs - view.old_log_probs).clamp(-20, 20).exp(), {}


class NeedsTheReference(FakeLoss):
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return super().loss(view)[0] + 0.01 * (view.log_probs - view.ref_log_probs), {}


@hookimpl
def policy_losses() -> list[Implementation]:
    return [
        Implementation(c.__name__, c)
        for c in (
            *(MeanLoss, MetricWithGradient, UsesTheEntropy, WeighsByPosition, Explodes, CentresOverTheView),
            *(DropsTheFirstToken, FlipsTheSign, DeniesItsRatio, ClaimsARatio, TakesItsOwnRatio, NeedsTheReference),
        )
    ]
