"""What the conformance kit needs to build the strategy: that of turnwise-torch, at stage 3 with every parameter
sharded."""

from __future__ import annotations

from typing import Any

from turnwise_deepspeed.config import DeepspeedConfig
from turnwise_torch import fixtures


def strategy_fixture() -> dict[str, Any]:
    """As turnwise_torch.fixtures.strategy_fixture, with a `config` of this strategy."""
    config = DeepspeedConfig(stage=3, zero_optimization={"stage3_param_persistence_threshold": 0})
    return {**fixtures.strategy_fixture(), "config": config}
