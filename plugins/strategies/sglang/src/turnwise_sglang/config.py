"""The options of SGLang under its own names (strategy_config), what is ours beside them, and their arithmetic for
`plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen, validators

from turnwise.contracts.inference import BackendCapabilities, InferenceContext
from turnwise.data.numbers import BYTES

DEFAULT_FRACTION = 0.85
"""SGLang chooses mem_fraction_static by the device where it is not given; this is near what it chooses."""
RUNTIME_BYTES = 2_000_000_000
"""What the engine holds beside weights and cache: CUDA context, graphs, workspaces (an estimate)."""
AWAKE = (
    "SGLang keeps its memory while it sleeps. Fix: strategy_config: {enable_memory_saver: true}, or devices of its own"
)
IN_PLACE = (
    "pause_mode: 'in_place' goes on with the cache of the old weights after an update: the tokens match neither policy."
    " Fix: pause_mode: retract (or abort)"
)


def _positive(default: float) -> Any:
    return field(default=default, validator=validators.gt(0))


def _no_stale_cache(instance: Any, attribute: Any, value: str) -> None:
    if value == "in_place":
        raise ValueError(IN_PLACE)


@frozen
class SglangConfig:
    """SGLang's server arguments by their own names; those without a field here are collected in `engine_args`.

    Ours: `python` (the interpreter that has SGLang; None: this one), `base_url` (a server to attach to instead of
    starting one) with `api_key_env` (the environment variable that holds its key), `start_timeout`, `stop_timeout`,
    `request_timeout` (one response) and `control_timeout` (any other call) in seconds, `restarts` (how often a dead
    server is started again with the weights it had; 0: never, and no copy of the weights is kept), `pause_mode` (how
    responses in progress are stopped for a weight update: they go on in either case). `enable_memory_saver` None: where a training role uses the same
    GPUs.
    """

    python: str | None = None
    base_url: str | None = None
    api_key_env: str | None = None
    start_timeout: float = _positive(600.0)
    stop_timeout: float = _positive(20.0)
    request_timeout: float = _positive(3600.0)
    control_timeout: float = _positive(120.0)
    restarts: int = field(default=2, validator=validators.ge(0))
    pause_mode: Literal["retract", "abort", "in_place"] = field(default="retract", validator=_no_stale_cache)
    device: str | None = None
    tp_size: int = field(default=1, validator=validators.ge(1))
    pp_size: int = field(default=1, validator=validators.ge(1))
    dp_size: int = field(default=1, validator=validators.ge(1))
    mem_fraction_static: float | None = field(
        default=None, validator=validators.optional([validators.gt(0), validators.lt(1)])
    )
    load_format: str = "auto"
    context_length: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    disable_radix_cache: bool = False
    disable_cuda_graph: bool = False
    enable_deterministic_inference: bool = True
    enable_memory_saver: bool | None = None
    engine_args: Mapping[str, Any] = field(factory=dict)

    @property
    def capabilities(self) -> BackendCapabilities:
        """Adapters may come alone, and weights between two tokens; the server sleeps unless that was switched off; the arithmetic below."""
        # An attached server is somebody else's: its options are not ours to set.
        on_demand = self.enable_memory_saver is None and self.base_url is None
        return BackendCapabilities(
            adapters=True,
            updates_between_tokens=True,
            cannot_sleep="" if on_demand or self.enable_memory_saver else AWAKE,
            sleeps_on_demand=on_demand,
            attached=self.base_url is not None,
            devices_per_engine=self.devices_per_engine,
            data_parallel_size=self.data_parallel_size,
            memory=self.memory,
        )

    def sleeps(self, context: InferenceContext) -> bool:
        """Whether the server is started so that it gives its memory back while it sleeps."""
        if self.enable_memory_saver is None:
            return context.sleeps and bool(context.devices) and self.base_url is None
        return self.enable_memory_saver

    @property
    def devices_per_engine(self) -> int:
        """Those of one server."""
        return self.tp_size * self.pp_size * self.dp_size

    def data_parallel_size(self, world: int) -> int:
        """How many copies of the model `world` devices hold. Raises ValueError where they cannot be divided so."""
        if world % self.devices_per_engine:
            by_dp = f" × dp_size {self.dp_size}" if self.dp_size > 1 else ""
            raise ValueError(
                f"{world} devices are not divisible by tp_size {self.tp_size} × pp_size {self.pp_size}{by_dp}"
            )
        # Without dp_size: the copies inside a server count as well.
        return world // (self.tp_size * self.pp_size)

    def memory(self, facts: Mapping[str, Any]) -> dict[str, int]:
        """Bytes on one device while sampling: `weights`, `kv_cache` and what the engine needs itself (`activations`).

        `facts`: `parameters` (a count), `dtype`, `device_bytes` (memory of one device). mem_fraction_static holds
        weights and cache.
        """
        weights = int(facts["parameters"]) * BYTES[facts["dtype"]] // (self.tp_size * self.pp_size)
        fraction = DEFAULT_FRACTION if self.mem_fraction_static is None else self.mem_fraction_static
        return {
            "weights": weights,
            "kv_cache": max(0, int(fraction * facts["device_bytes"]) - weights),
            "activations": RUNTIME_BYTES,
        }
