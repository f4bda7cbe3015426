"""What the conformance kit needs to test the backend: a tiny model folder, and log-probs computed the plain way."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from turnwise.contracts.chat import ModelSourceContext
from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.contracts.train import Offer
from turnwise_hf.config import HfConfig
from turnwise_hf.source import HfModelSource
from turnwise_torch.fixtures import log_probs
from turnwise_torch.models import load_causal_lm

_TEXTS = ("The goal is 2 down 1 right. Holes: Left Down.", "Which way?", "Left", "Down", "Right", "Up")


@functools.cache
def _folder(seed: int = 0) -> Path:
    place = Path(tempfile.mkdtemp(prefix="turnwise-hf-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    # Wider than by default, so that a log-prob of another temperature or another token is far off.
    recipe = {
        "hidden_size": 32,
        "num_heads": 2,
        "initializer_range": 0.3,
        "max_position_embeddings": 256,
        "seed": seed,
    }
    return HfModelSource(
        None, ModelSourceContext(cache=place, texts=lambda: [{"role": "user", "content": text} for text in _TEXTS])
    ).prepare({"recipe": recipe})


def backend_fixture() -> dict[str, Any]:
    """`config`, `context` (fp32, a recipe's model, its chat), `reference_logprobs(ids, temperature)`, `offer(version)`
    and `request(seed, …)`; `other_offer` and `other_logprobs` are of a model of another seed.

    `reference_logprobs`: float32 [n] for ids [n], the log-prob of each id given those before it (0 for the first), of
    log_softmax(logits / temperature) of one plain forward pass in fp32.
    """
    folder = _folder()
    source = HfModelSource(None, ModelSourceContext(cache=folder.parent))
    chat = source.chat(folder)
    model = load_causal_lm(folder, "fp32", "eager")

    def request(seed: int, temperature: float = 1.0, max_new_tokens: int = 8) -> Request:
        ids = chat.render([{"role": "user", "content": "Which way?"}])
        return Request(seed, GeneratingArgs(max_new_tokens, temperature), max_new_tokens, (0, 0, seed, 0, 0), ids=ids)

    def offer(version: int, seed: int = 0) -> Offer:
        return Offer("safetensors", version, {"folder": str(_folder(seed))})

    context = InferenceContext(folder, chat, dtype="fp32", sequence_length=256)
    return {
        "config": HfConfig(),
        "context": context,
        "reference_logprobs": functools.partial(log_probs, model),
        "request": request,
        "offer": offer,
        "other_offer": functools.partial(offer, seed=1),
        "other_logprobs": functools.partial(log_probs, load_causal_lm(_folder(1), "fp32", "eager")),
    }


def source_fixture() -> dict[str, Any]:
    """`pretrain`: the smallest recipe, whose tokenizer needs no texts of environments; `texts` that its chat can
    write."""
    recipe = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "tokenizer": "byte_bpe", "vocab_size": 300}
    return {"pretrain": {"recipe": recipe}, "texts": ["Left", "The goal is near: 2 down."]}
