"""The options of DeepSpeed under its own names (strategy_config), and their arithmetic for `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Attribute, field, frozen, validators

from turnwise.contracts.train import StrategyCapabilities
from turnwise.data.numbers import BYTES
from turnwise_torch.config import adam_betas

STAGES = (0, 1, 2, 3)


def _zero(instance: Any, attribute: Attribute[Any], value: Mapping[str, Any]) -> None:
    stage = value.get("stage", 2)
    if type(stage) is not int or stage not in STAGES:
        raise ValueError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r}")
    for key in ("offload_optimizer", "offload_param"):
        block = value.get(key)
        if block is not None and not (
            isinstance(block, Mapping) and block.get("device", "none") in ("none", "cpu", "nvme")
        ):
            raise ValueError(f"zero_optimization.{key} must be a mapping with device none, cpu or nvme, got {block!r}")


@frozen
class DeepspeedConfig:
    """DeepSpeed's configuration by its own names; keys without a field here are collected in `engine_args`.

    `stage` is short for `zero_optimization: {stage: …}`; ValueError when the two disagree. `betas` and `eps` are
    AdamW's, which is torch's own, or with `zero_force_ds_cpu_optimizer` DeepSpeedCPUAdam (compiled when it is first
    used; needs an offloaded optimizer).
    `logits_chunk`: tokens whose logits exist at a time (0: as many as hold 2²⁶ logits).
    """

    stage: int | None = field(default=None, validator=validators.optional(validators.in_(STAGES)))
    zero_optimization: Mapping[str, Any] = field(factory=dict, validator=_zero)
    betas: tuple[float, ...] = adam_betas()
    eps: float = field(default=1e-8, validator=validators.gt(0))
    logits_chunk: int = field(default=0, validator=validators.ge(0))
    zero_force_ds_cpu_optimizer: bool = False
    engine_args: Mapping[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.stage is not None and self.zero_optimization.get("stage", self.stage) != self.stage:
            raise ValueError(
                f"stage {self.stage} and zero_optimization.stage {self.zero_optimization['stage']} are the same option"
            )

    @property
    def zero_stage(self) -> int:
        """0: nothing is sharded, 1: the optimizer, 2: gradients too, 3: weights too. 2 where none is named: 0 sums
        gradients in bf16."""
        return int(self.zero_optimization.get("stage", 2) if self.stage is None else self.stage)

    def offloads(self, what: str) -> bool:
        """Whether `what` (`optimizer` or `param`) lives outside the device."""
        return (self.zero_optimization.get(f"offload_{what}") or {}).get("device", "none") != "none"

    @property
    def capabilities(self) -> StrategyCapabilities:
        """Adapters leave alone, and the arithmetic below."""
        return StrategyCapabilities(adapters=True, data_parallel_size=self.data_parallel_size, memory=self.memory)

    def data_parallel_size(self, world: int) -> int:
        """Every device sees rows of its own."""
        return world

    def memory(self, facts: Mapping[str, Any]) -> dict[str, int]:
        """Bytes on one device: `weights`, `gradients`, `optimizer`; `cpu`: what is offloaded from it.

        `facts`: `parameters` (a count), `dtype`, `world` (devices), `trainable` (default true). Sharded as in ZeRO
        (Rajbhandari et al. 2020, arXiv 1910.02054, section 3): 16-bit weights of 2 bytes, fp32 masters and two moments
        of 12, and gradients as `_gradient_bytes` says.
        """
        count, width, world, stage = (
            int(facts["parameters"]),
            BYTES[facts["dtype"]],
            int(facts["world"]),
            self.zero_stage,
        )
        weights = count * width // (world if stage >= 3 else 1)
        gradients = optimizer = 0
        if facts.get("trainable", True):
            gradients = count * self._gradient_bytes(width) // (world if stage >= 2 else 1)
            # A 32-bit model is its own master: the moments alone are added.
            optimizer = count * (8 if width == 4 else 12) // (world if stage >= 1 else 1)
        cpu = 0
        if self.offloads("optimizer"):
            cpu, gradients, optimizer = cpu + gradients + optimizer, 0, 0
        if self.offloads("param"):
            cpu, weights = cpu + weights, 0
        return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "cpu": cpu}

    def _gradient_bytes(self, width: int) -> int:
        """Of one parameter's gradient, where a weight takes `width` bytes."""
        # A 32-bit model sums in its own gradients, and at stage 0 a 16-bit one does, too.
        if width == 4 or self.zero_stage == 0:
            return width
        # Sums over micro-batches are fp32. Stage 1 keeps the model's own 16-bit gradients allocated beside them; from
        # stage 2 on they go when they are added.
        return 4 + width if self.zero_stage == 1 else 4
