"""The options of SGLang under its own names (strategy_config), and their arithmetic for `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen, validators

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
DEFAULT_FRACTION = 0.85
"""SGLang chooses mem_fraction_static by the device where it is not given; this is near what it chooses."""
RUNTIME_BYTES = 2_000_000_000
"""What the engine holds beside weights and cache: CUDA context, graphs, workspaces (an estimate)."""


@frozen
class SglangConfig:
    """SGLang's server arguments by their own names; those without a field here are collected in `engine_args`."""

    tp_size: int = field(default=1, validator=validators.ge(1))
    pp_size: int = field(default=1, validator=validators.ge(1))
    mem_fraction_static: float | None = field(default=None, validator=validators.optional([validators.gt(0), validators.lt(1)]))
    load_format: str = "auto"
    context_length: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    disable_radix_cache: bool = False
    disable_cuda_graph: bool = False
    engine_args: Mapping[str, Any] = field(factory=dict)

    def data_parallel_size(self, world: int) -> int:
        """How many engines `world` devices hold. Raises ValueError where they cannot be divided so."""
        if world % (self.tp_size * self.pp_size):
            raise ValueError(f"{world} devices are not divisible by tp_size {self.tp_size} × pp_size {self.pp_size}")
        return world // (self.tp_size * self.pp_size)

    def memory(self, facts: Mapping[str, Any]) -> dict[str, int]:
        """Bytes on one device while sampling: `weights`, `kv_cache` and what the engine needs itself (`activations`).

        `facts`: `parameters` (a count), `dtype`, `device_bytes` (memory of one device). mem_fraction_static holds weights and cache.
        """
        weights = int(facts["parameters"]) * BYTES[facts["dtype"]] // (self.tp_size * self.pp_size)
        fraction = DEFAULT_FRACTION if self.mem_fraction_static is None else self.mem_fraction_static
        return {"weights": weights, "kv_cache": max(0, int(fraction * facts["device_bytes"]) - weights), "activations": RUNTIME_BYTES}
