"""What the conformance kit needs to build the losses of this distribution."""

from __future__ import annotations

from typing import Any

from turnwise.contracts.loss import LossContext
from turnwise_losses.config import (
    CispoConfig,
    DppoConfig,
    GmpoConfig,
    GspoConfig,
    Kimi15Config,
    PpoConfig,
    SapoConfig,
    TisConfig,
    ToprConfig,
    VanillaConfig,
)


def ppo_fixture() -> dict[str, Any]:
    """The options and the context of `ppo`, the dual clip on."""
    return {"config": PpoConfig(dual_clip_loss=True), "context": LossContext()}


def vanilla_fixture() -> dict[str, Any]:
    """The options and the context of `vanilla`."""
    return {"config": VanillaConfig(), "context": LossContext()}


def tis_fixture() -> dict[str, Any]:
    """The options and the context of `tis`."""
    return {"config": TisConfig(), "context": LossContext()}


def topr_fixture() -> dict[str, Any]:
    """The options and the context of `topr`."""
    return {"config": ToprConfig(), "context": LossContext()}


def cispo_fixture() -> dict[str, Any]:
    """The options and the context of `cispo`."""
    return {"config": CispoConfig(), "context": LossContext()}


def kimi15_fixture() -> dict[str, Any]:
    """The options and the context of `kimi15`."""
    return {"config": Kimi15Config(), "context": LossContext()}


def gspo_fixture() -> dict[str, Any]:
    """The options and the context of `gspo`."""
    return {"config": GspoConfig(), "context": LossContext()}


def gmpo_fixture() -> dict[str, Any]:
    """The options and the context of `gmpo`."""
    return {"config": GmpoConfig(), "context": LossContext()}


def sapo_fixture() -> dict[str, Any]:
    """The options and the context of `sapo`."""
    return {"config": SapoConfig(), "context": LossContext()}


def dppo_fixture() -> dict[str, Any]:
    """The options and the context of `dppo`."""
    return {"config": DppoConfig(), "context": LossContext()}
