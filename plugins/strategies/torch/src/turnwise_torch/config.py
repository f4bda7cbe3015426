"""The options of the strategy `torch` (strategy_config), and its arithmetic for `plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import Attribute, field, frozen

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _two_betas(instance: Any, attribute: Attribute[Any], value: tuple[float, ...]) -> None:
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"betas must be two numbers in [0, 1), got {list(value)}")


def _positive(instance: Any, attribute: Attribute[Any], value: float) -> None:
    if value <= 0:
        raise ValueError(f"{attribute.name} must be positive, got {value}")


def _not_negative(instance: Any, attribute: Attribute[Any], value: int) -> None:
    if value < 0:
        raise ValueError(f"{attribute.name} must not be negative, got {value}")


@frozen
class TorchConfig:
    """AdamW's `betas` and `eps`; `logits_chunk`: tokens whose logits exist at a time (0: as many as hold 2²⁶ logits)."""

    betas: tuple[float, ...] = field(default=(0.9, 0.999), converter=_floats, validator=_two_betas)
    eps: float = field(default=1e-8, validator=_positive)
    logits_chunk: int = field(default=0, validator=_not_negative)

    def data_parallel_size(self, world: int) -> int:
        """Always 1: one process on one device."""
        return 1

    def memory(self, facts: Mapping[str, Any]) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer state (activations left out).

        `facts`: `parameters` (a count), `dtype` (bf16 | fp16 | fp32), `trainable` (default true). A 16-bit model keeps fp32 master
        weights and fp32 accumulated gradients beside its own.
        """
        count, width = int(facts["parameters"]), BYTES[facts["dtype"]]
        if not facts.get("trainable", True):
            return {"weights": count * width, "gradients": 0, "optimizer": 0}
        half = width == 2
        return {"weights": count * width, "gradients": count * (width + 4 * half), "optimizer": count * (8 + 4 * half)}
