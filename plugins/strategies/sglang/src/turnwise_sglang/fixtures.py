"""What the conformance kit needs to test the backend: a tiny model, one real server for all tests, and log-probs computed the plain way.

Needs turnwise-hf for the model and its chat, and an interpreter with SGLang: TURNWISE_SGLANG_PYTHON, or this one.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from turnwise.contracts.chat import Chat, ModelSourceContext
from turnwise.contracts.inference import InferenceContext
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import float32
from turnwise.ports import free_port
from turnwise_sglang.arguments import environment, machine_problem, server_arguments
from turnwise_sglang.config import SglangConfig
from turnwise_sglang.server import Server
from turnwise_torch.models import load_causal_lm

PYTHON = "TURNWISE_SGLANG_PYTHON"
URL = "TURNWISE_SGLANG_URL"
LENGTH = 512
_TEXTS = ("The goal is 2 down 1 right. Holes: Left Down.", "Which way?", "Left", "Down", "Right", "Up", "one two three a b")
_START = 300.0


def interpreter() -> str:
    """The interpreter that has SGLang. Skips the test, with the reason, where there is none."""
    python = os.environ.get(PYTHON) or sys.executable
    if lack := machine_problem(SglangConfig(python=python)):
        pytest.skip(f"{lack} ({PYTHON} names the interpreter for tests)")
    return python


@functools.cache
def model(seed: int = 0) -> Path:
    """A tiny Qwen2 with a word tokenizer. Its weights are larger than by default, so that a log-prob of another temperature or token is far off,
    and small enough that fp32 rounds log-probs by 1e-5 at most: twice as large, by 1e-4."""
    from turnwise_hf.source import HfModelSource

    place = Path(tempfile.mkdtemp(prefix="turnwise-sglang-model-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    source = HfModelSource(None, ModelSourceContext(cache=place, texts=lambda: [{"role": "user", "content": text} for text in _TEXTS]))
    recipe = {"hidden_size": 64, "num_heads": 2, "initializer_range": 0.15, "max_position_embeddings": LENGTH, "seed": seed}
    return source.prepare({"recipe": recipe})


@functools.cache
def chat() -> Chat:
    """The chat of `model`, whatever its seed."""
    from turnwise_hf.source import HfModelSource

    return HfModelSource(None, ModelSourceContext(cache=model().parent)).chat(model())


def context(**changes: Any) -> InferenceContext:
    """The role of the tests: fp32 on the CPU."""
    return InferenceContext(**{"model": model(), "chat": chat(), "dtype": "fp32", "sequence_length": LENGTH, **changes})


@functools.cache
def served() -> str:
    """The address of one server for the whole session: that of TURNWISE_SGLANG_URL, else a new one that ends with this process."""
    if URL in os.environ:
        return os.environ[URL]
    config, port = SglangConfig(python=interpreter()), free_port()
    server = Server(str(config.python), server_arguments(config, context(), port), environment(config, context()), port)
    deadline = time.monotonic() + _START
    while True:
        try:
            if httpx2.get(f"{server.url}/health", timeout=5.0, trust_env=False).status_code == 200:
                return server.url
        except httpx2.HTTPError:
            pass
        if not server.alive or time.monotonic() > deadline:
            raise RuntimeError(f"SGLang did not start: {server.tail()}")
        time.sleep(0.2)


@functools.cache
def _reference(folder: Path) -> Any:
    return load_causal_lm(folder, "fp32", "eager")


def reference_logprobs(ids: Sequence[int] | np.ndarray, temperature: float, folder: Path | None = None) -> np.ndarray:
    """float32 [n] for ids [n]: the log-prob of each id given those before it (0 for the first), by one plain forward pass in fp32."""
    tokens = torch.tensor(np.asarray(ids), dtype=torch.int64)
    with torch.no_grad():
        logits = _reference(folder or model())(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    chosen = torch.log_softmax(logits / (temperature or 1.0), dim=-1).gather(1, tokens[1:, None])[:, 0]
    return float32(np.concatenate([[0.0], chosen.numpy()]))


def backend_fixture() -> dict[str, Any]:
    """`config` (attached to the session's server), `context`, `reference_logprobs(ids, temperature)` and `offer(version)` of equal weights."""

    def offer(version: int) -> Offer:
        return Offer("safetensors", version, {"folder": str(model())})

    return {"config": SglangConfig(base_url=served()), "context": context(), "reference_logprobs": reference_logprobs, "offer": offer, "atol": 1e-4}
