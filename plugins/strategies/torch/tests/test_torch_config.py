"""The strategy's options and its arithmetic."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from turnwise_torch.config import FsdpConfig, TorchConfig


@pytest.mark.parametrize("world", [1, 4])
def test_every_device_is_a_data_parallel_rank(world: int) -> None:
    assert TorchConfig().data_parallel_size(world) == world


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"dtype": "fp32"}, {"weights": 400, "gradients": 400, "optimizer": 800}),
        ({"dtype": "bf16"}, {"weights": 200, "gradients": 600, "optimizer": 1200}),
        ({"dtype": "bf16", "trainable": False}, {"weights": 200, "gradients": 0, "optimizer": 0}),
    ],
)
def test_memory_counts_weights_gradients_and_optimizer(facts: dict[str, Any], expected: dict[str, int]) -> None:
    assert TorchConfig().memory({"parameters": 100, **facts}) == expected


@pytest.mark.parametrize(
    ("options", "facts", "expected"),
    [
        ({}, {"dtype": "bf16"}, {"weights": 100, "gradients": 400, "optimizer": 200}),
        ({"reduce_every_microbatch": True}, {"dtype": "bf16"}, {"weights": 100, "gradients": 100, "optimizer": 200}),
        ({"reshard_after_forward": False}, {"dtype": "bf16"}, {"weights": 300, "gradients": 400, "optimizer": 200}),
        ({"cpu_offload": True}, {"dtype": "fp32"}, {"weights": 0, "gradients": 400, "optimizer": 0, "cpu": 300}),
        ({}, {"dtype": "bf16", "trainable": False}, {"weights": 50, "gradients": 0, "optimizer": 0}),
    ],
)
def test_memory_of_four_devices_is_that_of_one_of_them(
    options: dict[str, bool], facts: dict[str, Any], expected: dict[str, int]
) -> None:
    assert TorchConfig(fsdp=FsdpConfig(**options)).memory({"parameters": 100, "world": 4, **facts}) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ({"betas": (0.9,)}, r"betas must be two numbers"),
        ({"eps": 0.0}, r"eps must be positive, got 0.0"),
        ({"logits_chunk": -1}, r"logits_chunk must not be negative, got -1"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchConfig(**options)


def test_listing_and_configuring_the_plugin_imports_no_torch() -> None:
    code = (
        "import sys, turnwise_torch, turnwise_torch.config; turnwise_torch.train_strategies(); sys.exit('torch' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
