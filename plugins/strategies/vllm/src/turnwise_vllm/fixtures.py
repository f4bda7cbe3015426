"""What the conformance kit needs to test the backend: a tiny model, one server for all tests, and log-probs computed
the plain way."""

from __future__ import annotations

import functools
import os
from typing import Any

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.contracts.train import Offer
from turnwise_serving.fixtures import chat, model, started
from turnwise_torch.fixtures import log_probs
from turnwise_torch.models import load_causal_lm
from turnwise_vllm.config import VllmConfig
from turnwise_vllm.process import Server

KEY = "TURNWISE_VLLM_KEY"
"""The environment variable with the key of the server that tests attach to."""


def model_context() -> InferenceContext:
    """The folder with its chat, in fp32."""
    return InferenceContext(model(), chat(), dtype="fp32", sequence_length=256, weight_sync_timeout=60.0)


@functools.cache
def server() -> Server:
    """A running server of the model, started once and stopped with this process. Starting takes half a minute."""
    return started(Server(VllmConfig(mode="server", block_size=32), model_context()))


def attach(to: Server, **options: Any) -> VllmConfig:
    """The options of a backend that is attached to a server of ours."""
    os.environ[KEY] = to.key
    return VllmConfig(mode="attach", base_url=to.url, api_key_env=KEY, **options)


def backend_fixture() -> dict[str, Any]:
    """`config` (attached to one server for all tests), `context`, `reference_logprobs(ids, temperature)`,
    `offer(version)`, `request(seed, …)`; `other_offer` and `other_logprobs` are of a model of another seed."""
    context = model_context()
    assert context.chat is not None
    words = context.chat
    plain, other = (load_causal_lm(model(seed), "fp32", "eager") for seed in (0, 1))

    def request(seed: int, temperature: float = 1.0, max_new_tokens: int = 8) -> Request:
        ids = words.render([{"role": "user", "content": "Which way?"}])
        return Request(seed, GeneratingArgs(max_new_tokens, temperature), max_new_tokens, (0, 0, seed, 0, 0), ids=ids)

    def offer(version: int, seed: int = 0) -> Offer:
        return Offer("safetensors", version, {"folder": str(model(seed))})

    return {
        "config": attach(server()),
        "context": context,
        "reference_logprobs": functools.partial(log_probs, plain),
        "request": request,
        "offer": offer,
        "other_logprobs": functools.partial(log_probs, other),
        "other_offer": functools.partial(offer, seed=1),
        "atol": 1e-4,
    }
