"""What the conformance kit needs to test the backend: a tiny model, one real server for all tests, and log-probs
computed the plain way.

Needs turnwise-hf for the model and its chat, and an interpreter with SGLang: TURNWISE_SGLANG_PYTHON, or this one.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.contracts.inference import InferenceContext
from turnwise.contracts.train import Offer
from turnwise.ports import free_port
from turnwise_serving.fixtures import LENGTH, chat, model, started
from turnwise_sglang.arguments import environment, machine_problem, server_arguments
from turnwise_sglang.config import SglangConfig
from turnwise_sglang.server import Server
from turnwise_torch.fixtures import log_probs
from turnwise_torch.models import load_causal_lm

PYTHON = "TURNWISE_SGLANG_PYTHON"
URL, KEY = "TURNWISE_SGLANG_URL", "TURNWISE_SGLANG_KEY"
"""The address and the key of a server that is there already."""


def interpreter() -> str:
    """The interpreter that has SGLang. Skips the test, with the reason, where there is none."""
    python = os.environ.get(PYTHON) or sys.executable
    if lack := machine_problem(SglangConfig(python=python)):
        pytest.skip(f"{lack} ({PYTHON} names the interpreter for tests)")
    return python


def context(**changes: Any) -> InferenceContext:
    """The role of the tests: fp32 on the CPU."""
    return InferenceContext(**{"model": model(), "chat": chat(), "dtype": "fp32", "sequence_length": LENGTH, **changes})


def attach(to: Server, **options: Any) -> SglangConfig:
    """The options of a backend that is attached to a server of ours."""
    os.environ[KEY] = to.key
    return SglangConfig(base_url=to.url, api_key_env=KEY, **options)


@functools.cache
def served() -> SglangConfig:
    """The options for one server for the whole session: that of TURNWISE_SGLANG_URL, else a new one that ends with this
    process."""
    if URL in os.environ:
        return SglangConfig(base_url=os.environ[URL], api_key_env=KEY)
    config, port = SglangConfig(python=interpreter()), free_port()
    server = Server(str(config.python), server_arguments(config, context(), port), environment(config, context()), port)
    return attach(started(server))


@functools.cache
def _reference(folder: Path) -> Any:
    return load_causal_lm(folder, "fp32", "eager")


def reference_logprobs(ids: Sequence[int] | np.ndarray, temperature: float, folder: Path | None = None) -> np.ndarray:
    """float32 [n] for ids [n]: the log-prob of each id given those before it (0 for the first), by one plain forward
    pass in fp32."""
    return log_probs(_reference(folder or model()), ids, temperature)


def backend_fixture() -> dict[str, Any]:
    """`config` (attached to the session's server), `context`, `reference_logprobs(ids, temperature)` and
    `offer(version)` of equal weights, `other_logprobs` and `other_offer` of others."""

    def offer(version: int, seed: int = 0) -> Offer:
        return Offer("safetensors", version, {"folder": str(model(seed))})

    return {
        "config": served(),
        "context": context(),
        "reference_logprobs": reference_logprobs,
        "offer": offer,
        "other_logprobs": functools.partial(reference_logprobs, folder=model(1)),
        "other_offer": functools.partial(offer, seed=1),
        "atol": 1e-4,
    }
