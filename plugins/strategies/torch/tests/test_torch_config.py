"""The strategy's options and its arithmetic."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from turnwise_torch.config import TorchConfig


def test_it_is_one_data_parallel_rank() -> None:
    assert TorchConfig().data_parallel_size(1) == 1


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
    code = "import sys, turnwise_torch, turnwise_torch.config; turnwise_torch.train_strategies(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
