"""What stands for SGLang until its engine comes: it refuses, before anything starts."""

from __future__ import annotations

from turnwise.contracts.inference import InferenceContext
from turnwise.errors import ConfigError
from turnwise_sglang.config import SglangConfig

REFUSAL = "strategy sglang cannot run in this version, it plans only. Fix: turnwise plan, or strategy_name: hf"


class SglangBackend:
    """Refuses to be built; `turnwise plan` needs its configuration class alone."""

    def __init__(self, config: SglangConfig, context: InferenceContext) -> None:
        raise ConfigError(REFUSAL)

    @staticmethod
    def check(config: SglangConfig, context: InferenceContext) -> list[str]:
        """One line: this version has no engine for it."""
        return [REFUSAL]
