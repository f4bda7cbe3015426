"""What stands for vLLM until its engine comes: it refuses, before anything starts."""

from __future__ import annotations

from turnwise.contracts.inference import InferenceContext
from turnwise.errors import ConfigError
from turnwise_vllm.config import VllmConfig

REFUSAL = "strategy vllm cannot run in this version, it plans only. Fix: turnwise plan, or strategy_name: hf"


class VllmBackend:
    """Refuses to be built; `turnwise plan` needs its configuration class alone."""

    def __init__(self, config: VllmConfig, context: InferenceContext) -> None:
        raise ConfigError(REFUSAL)

    @staticmethod
    def check(config: VllmConfig, context: InferenceContext) -> list[str]:
        """One line: this version has no engine for it."""
        return [REFUSAL]
