"""The options of the strategy `torch` (strategy_config), and its arithmetic for `plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import Attribute, field, frozen

from turnwise.contracts.train import StrategyCapabilities
from turnwise.data.numbers import BYTES


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _two_betas(instance: Any, attribute: Attribute[Any], value: tuple[float, ...]) -> None:
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"betas must be two numbers in [0, 1), got {list(value)}")


def adam_betas() -> Any:
    """The option `betas` of AdamW, in every strategy that has it."""
    return field(default=(0.9, 0.999), converter=_floats, validator=_two_betas)


def _positive(instance: Any, attribute: Attribute[Any], value: float) -> None:
    if value <= 0:
        raise ValueError(f"{attribute.name} must be positive, got {value}")


def _not_negative(instance: Any, attribute: Attribute[Any], value: int) -> None:
    if value < 0:
        raise ValueError(f"{attribute.name} must not be negative, got {value}")


@frozen
class FsdpConfig:
    """How FSDP2 shards a model of several devices. `cpu_offload`: parameters, gradients and the optimizer live in main
    memory.
    `reshard_after_forward`: a layer is gathered again in the backward pass instead of staying whole.
    `reduce_every_microbatch`: gradients are summed over the devices after every micro-batch instead of once an update;
    slower, and no device holds the whole model's gradient."""

    cpu_offload: bool = False
    reshard_after_forward: bool = True
    reduce_every_microbatch: bool = False


@frozen
class TorchConfig:
    """AdamW's `betas` and `eps`; `logits_chunk`: tokens whose logits exist at a time (0: as many as hold 2²⁶ logits);
    `fsdp`: of several devices."""

    betas: tuple[float, ...] = adam_betas()
    eps: float = field(default=1e-8, validator=_positive)
    logits_chunk: int = field(default=0, validator=_not_negative)
    fsdp: FsdpConfig = field(factory=FsdpConfig)

    @property
    def capabilities(self) -> StrategyCapabilities:
        """Adapters leave alone, and the arithmetic below."""
        return StrategyCapabilities(adapters=True, data_parallel_size=self.data_parallel_size, memory=self.memory)

    def data_parallel_size(self, world: int) -> int:
        """Every device sees rows of its own."""
        return world

    def memory(self, facts: Mapping[str, Any]) -> dict[str, int]:
        """Bytes on one device of weights, gradients and optimizer state; `cpu`: what is offloaded from it (activations
        left out).

        `facts`: `parameters` (a count), `dtype` (bf16 | fp16 | fp32), `trainable` (default true), `world` (devices,
        default 1). One device keeps, for a 16-bit model, fp32 master weights and fp32 accumulated gradients beside its
        own. Several shard fp32 weights and moments (a frozen model: the compute dtype); what is gathered counts only
        where it stays, the fp32 gradient is whole where it is summed once an update.
        """
        count, width, world = int(facts["parameters"]), BYTES[facts["dtype"]], int(facts.get("world", 1))
        trainable = facts.get("trainable", True)
        if world > 1:
            return self._sharded(count, width, world, trainable)
        if not trainable:
            return {"weights": count * width, "gradients": 0, "optimizer": 0}
        # A 16-bit parameter has an fp32 sum of its gradients and an fp32 master beside it, 4 bytes each; AdamW's two
        # moments are 8.
        half = width == 2
        return {"weights": count * width, "gradients": count * (width + 4 * half), "optimizer": count * (8 + 4 * half)}

    def _sharded(self, count: int, width: int, world: int, trainable: bool) -> dict[str, int]:
        weights = count * (4 if trainable else width) // world
        gradients = count * 4 // (world if self.fsdp.reduce_every_microbatch else 1) if trainable else 0
        optimizer = count * 8 // world if trainable else 0
        gathered = 0 if self.fsdp.reshard_after_forward else count * width
        if self.fsdp.cpu_offload:
            return {"weights": gathered, "gradients": gradients, "optimizer": 0, "cpu": weights + optimizer}
        return {"weights": weights + gathered, "gradients": gradients, "optimizer": optimizer}
