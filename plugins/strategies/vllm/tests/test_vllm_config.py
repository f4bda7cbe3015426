"""The options of vllm: how devices divide, what a device holds, the engine's own names, and the refusal to run."""

from __future__ import annotations

import pytest

from turnwise.config.convert import structure
from turnwise.contracts.inference import InferenceContext
from turnwise.errors import ConfigError
from turnwise_vllm import inference_backends
from turnwise_vllm.backend import VllmBackend
from turnwise_vllm.config import RUNTIME_BYTES, VllmConfig

GB = 10**9
TP, PP, SHARE = "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization"


@pytest.mark.parametrize(("tp", "pp", "world", "engines"), [(1, 1, 8, 8), (4, 1, 8, 2), (2, 2, 8, 2), (1, 1, 1, 1)])
def test_devices_are_divided_into_engines(tp: int, pp: int, world: int, engines: int) -> None:
    assert VllmConfig(**{TP: tp, PP: pp}).data_parallel_size(world) == engines


def test_devices_that_cannot_be_divided_are_an_error_that_names_the_sizes() -> None:
    with pytest.raises(ValueError, match=f"6 devices are not divisible by {TP} 4"):
        VllmConfig(**{TP: 4}).data_parallel_size(6)


def test_the_cache_gets_what_the_weights_leave() -> None:
    facts = {"parameters": 7 * GB, "dtype": "fp16", "device_bytes": 80 * GB}
    assert VllmConfig(**{SHARE: 0.5}).memory(facts) == {"weights": 14 * GB, "kv_cache": 26 * GB - RUNTIME_BYTES, "activations": RUNTIME_BYTES}
    assert VllmConfig(**{SHARE: 0.5, TP: 2}).memory(facts)["weights"] == 7 * GB
    assert VllmConfig(**{SHARE: 0.1}).memory(facts)["kv_cache"] == 0


@pytest.mark.parametrize("options", [{TP: 0}, {SHARE: 0.0}, {SHARE: 1.5}])
def test_values_out_of_range_are_refused(options: dict[str, float]) -> None:
    assert structure(VllmConfig, options)[1]


def test_nothing_heavy_is_needed_and_the_engine_is_named() -> None:
    (record,) = inference_backends()
    assert record.requires == ("vllm",)
    assert "does not run" in record.summary


def test_it_refuses_to_run_in_one_line() -> None:
    context = InferenceContext(model=None, chat=None)
    (line,) = VllmBackend.check(VllmConfig(), context)
    assert line.startswith("strategy vllm cannot run in this version, it plans only. Fix: ")
    with pytest.raises(ConfigError, match="plans only"):
        VllmBackend(VllmConfig(), context)
