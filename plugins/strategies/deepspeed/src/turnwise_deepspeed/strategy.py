"""What stands for DeepSpeed until its engine comes: it refuses, before anything starts."""

from __future__ import annotations

from turnwise.contracts.train import TrainContext
from turnwise.errors import ConfigError
from turnwise_deepspeed.config import DeepspeedConfig

REFUSAL = "strategy deepspeed cannot run in this version, it plans only. Fix: turnwise plan, or strategy_name: torch"


class DeepspeedStrategy:
    """Refuses to be built; `turnwise plan` needs its configuration class alone."""

    def __init__(self, config: DeepspeedConfig, context: TrainContext) -> None:
        raise ConfigError(REFUSAL)

    @staticmethod
    def check(config: DeepspeedConfig, context: TrainContext) -> list[str]:
        """One line: this version has no engine for it."""
        return [REFUSAL]
