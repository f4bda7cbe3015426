"""What the conformance kit needs to test the backend: a tiny model, one server for all tests, and log-probs computed the plain way."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turnwise.contracts.chat import ModelSourceContext
from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import float32
from turnwise_hf.source import HfModelSource
from turnwise_torch.models import load_causal_lm
from turnwise_vllm.config import VllmConfig
from turnwise_vllm.server import ServerProcess

_TEXTS = ("The goal is 2 down 1 right. Holes: Left Down.", "Which way?", "Left", "Down", "Right", "Up")
_START = 300.0


@functools.cache
def model_folder() -> Path:
    """A random Qwen2 with heads that vLLM's CPU attention knows. Its weights are large enough to set tokens far apart in probability, and small
    enough that fp32 rounds log-probs by 1e-5 at most: twice as large, by 1e-4."""
    place = Path(tempfile.mkdtemp(prefix="turnwise-vllm-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    recipe = {"hidden_size": 64, "num_heads": 2, "initializer_range": 0.15, "max_position_embeddings": 512}
    context = ModelSourceContext(cache=place, texts=lambda: [{"role": "user", "content": text} for text in _TEXTS])
    return HfModelSource(None, context).prepare({"recipe": recipe})


def model_context() -> InferenceContext:
    """The folder with its chat, in fp32."""
    folder = model_folder()
    chat = HfModelSource(None, ModelSourceContext(cache=folder.parent)).chat(folder)
    return InferenceContext(folder, chat, dtype="fp32", sequence_length=256, weight_sync_timeout=60.0)


@functools.cache
def server() -> ServerProcess:
    """A running server of the model, started once and stopped with this process. Starting takes half a minute."""
    process = ServerProcess(VllmConfig(mode="server", block_size=32), model_context())
    atexit.register(process.stop)
    deadline = time.monotonic() + _START
    while True:
        try:
            urllib.request.urlopen(f"{process.address}/health", timeout=5).close()
            return process
        except (urllib.error.URLError, OSError):
            if (said := process.ended()) or time.monotonic() > deadline:
                raise RuntimeError(said or "the server did not start in time") from None
            time.sleep(0.25)


def log_probs(model: Any, ids: Sequence[int] | np.ndarray, temperature: float) -> np.ndarray:
    """float32 [n] for ids [n]: the log-prob of each id given those before it (0 for the first), of one plain forward pass."""
    tokens = torch.tensor(np.asarray(ids), dtype=torch.int64)
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    chosen = torch.log_softmax(logits / (temperature or 1.0), dim=-1).gather(1, tokens[1:, None])[:, 0]
    return float32(np.concatenate([[0.0], chosen.numpy()]))


def backend_fixture() -> dict[str, Any]:
    """`config` (attached to one server for all tests), `context`, `reference_logprobs(ids, temperature)`, `offer(version)`, `request(seed, …)`."""
    context = model_context()
    assert context.model is not None
    assert context.chat is not None
    chat, folder = context.chat, context.model
    model = load_causal_lm(folder, "fp32", "eager")

    def request(seed: int, temperature: float = 1.0, max_new_tokens: int = 8) -> Request:
        ids = chat.render([{"role": "user", "content": "Which way?"}])
        return Request(seed, GeneratingArgs(max_new_tokens, temperature), max_new_tokens, (0, 0, seed, 0, 0), ids=ids)

    return {
        "config": VllmConfig(mode="attach", base_url=server().address),
        "context": context,
        "reference_logprobs": lambda ids, temperature: log_probs(model, ids, temperature),
        "request": request,
        "offer": lambda version: Offer("safetensors", version, {"folder": str(folder)}),
        "atol": 1e-4,
    }
