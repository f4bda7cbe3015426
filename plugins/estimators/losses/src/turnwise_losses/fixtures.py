"""What the conformance kit needs to build the losses of this distribution."""

from __future__ import annotations

from typing import Any

from turnwise.contracts.loss import LossContext
from turnwise_losses.config import PpoConfig, VanillaConfig


def ppo_fixture() -> dict[str, Any]:
    """The options and the context of `ppo`, the dual clip on."""
    return {"config": PpoConfig(dual_clip_loss=True), "context": LossContext()}


def vanilla_fixture() -> dict[str, Any]:
    """The options and the context of `vanilla`."""
    return {"config": VanillaConfig(), "context": LossContext()}
