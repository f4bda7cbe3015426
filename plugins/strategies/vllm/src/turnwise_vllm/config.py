"""The options of vLLM under its own names (strategy_config), and their arithmetic for `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen, validators

from turnwise.contracts.inference import BackendCapabilities, InferenceContext
from turnwise.data.numbers import BYTES

RUNTIME_BYTES = 1_500_000_000
"""What the engine holds beside weights and cache: CUDA context, graphs, workspaces (an estimate)."""


@frozen
class VllmConfig:
    """Where the engine runs (`mode`, `base_url`, `api_key_env`, the time limits), then vLLM's engine arguments by their
    own names; those without a field here are collected in `engine_args`.

    `mode`: `in_process` (an AsyncLLM of this process), `server` (a server started for the run), `attach` (the server at
    `base_url`, whose key, if it has one, is in the environment variable `api_key_env`).
    `logprobs_mode`: which log-probs vLLM computes; the README says for which requests they are the trainer's.
    `enable_sleep_mode` None: where a training role uses the same GPUs.
    `enforce_eager` None: yes on a CPU, no on GPUs. `python_path`: folders that the server of mode `server` imports from
    before its own.
    """

    mode: Literal["in_process", "server", "attach"] = "in_process"
    base_url: str | None = None
    api_key_env: str | None = None
    python_path: tuple[str, ...] = ()
    start_timeout: float = field(default=600.0, validator=validators.gt(0))
    request_timeout: float = field(default=1800.0, validator=validators.gt(0))
    tensor_parallel_size: int = field(default=1, validator=validators.ge(1))
    pipeline_parallel_size: int = field(default=1, validator=validators.ge(1))
    gpu_memory_utilization: float = field(default=0.9, validator=[validators.gt(0), validators.le(1)])
    kv_cache_memory_bytes: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    block_size: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    load_format: str = "auto"
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    enable_prefix_caching: bool | None = None
    enable_sleep_mode: bool | None = None
    max_model_len: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    max_num_seqs: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    max_num_batched_tokens: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    enforce_eager: bool | None = None
    limit_mm_per_prompt: Mapping[str, Any] = field(factory=dict)
    engine_args: Mapping[str, Any] = field(factory=dict)

    @property
    def capabilities(self) -> BackendCapabilities:
        """Adapters may come alone, and weights in mid-response; the engine sleeps unless that was switched off; the
        arithmetic below."""
        # How an attached server was started is not known here: the call itself shows whether it can sleep.
        own = self.mode != "attach"
        return BackendCapabilities(
            adapters=True,
            cannot_sleep=(
                "vLLM starts without sleep mode. Fix: strategy_config.enable_sleep_mode: true, or devices of its own"
                if own and self.enable_sleep_mode is False
                else ""
            ),
            sleeps_on_demand=own and self.enable_sleep_mode is None,
            attached=self.base_url is not None,
            updates_between_tokens=True,
            devices_per_engine=self.devices_per_engine,
            data_parallel_size=self.data_parallel_size,
            memory=self.memory,
        )

    def sleeps(self, context: InferenceContext) -> bool:
        """Whether an engine of our own is started so that it can sleep."""
        if self.mode == "attach":
            return False
        return context.sleeps and bool(context.devices) if self.enable_sleep_mode is None else self.enable_sleep_mode

    @property
    def devices_per_engine(self) -> int:
        """Devices (or processes, on a CPU) that hold one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def data_parallel_size(self, world: int) -> int:
        """How many engines `world` devices hold. Raises ValueError where they cannot be divided so."""
        if world % self.devices_per_engine:
            sizes = (
                f"tensor_parallel_size {self.tensor_parallel_size} × pipeline_parallel_size"
                f" {self.pipeline_parallel_size}"
            )
            raise ValueError(f"{world} devices are not divisible by {sizes}")
        return world // self.devices_per_engine

    def memory(self, facts: Mapping[str, Any]) -> dict[str, int]:
        """Bytes on one device while sampling: `weights`, `kv_cache` and what the engine needs itself (`activations`).

        `facts`: `parameters` (a count), `dtype`, `device_bytes` (memory of one device). The cache gets what
        gpu_memory_utilization leaves.
        """
        weights = int(facts["parameters"]) * BYTES[facts["dtype"]] // self.devices_per_engine
        # The share is of the whole device: weights and the engine's own needs come out of it.
        cache = int(self.gpu_memory_utilization * facts["device_bytes"]) - weights - RUNTIME_BYTES
        return {"weights": weights, "kv_cache": max(0, cache), "activations": RUNTIME_BYTES}
