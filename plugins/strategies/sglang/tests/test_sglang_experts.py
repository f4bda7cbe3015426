"""Experts that come one by one, as the trainers send them, reach the tensors that SGLang fuses them to."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.contracts.chat import ModelSourceContext
from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import int32
from turnwise_sglang import fixtures
from turnwise_sglang.backend import SglangBackend
from turnwise_sglang.config import SglangConfig
from turnwise_torch.experts import to_checkpoint
from turnwise_torch.models import load_causal_lm
from turnwise_torch.stream import Sender, buckets

pytestmark = [pytest.mark.engines, pytest.mark.matrix, pytest.mark.timeout(600)]
LONGEST = 480.0
CLOSE = 1e-4
FAR = 1e-2
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@functools.cache
def expert(place: Path, seed: int) -> Path:
    """A small Qwen3-MoE, wide enough that another weight shows in every log-prob."""
    source = pytest.importorskip("turnwise_hf.source", reason="the model and its chat come from turnwise-hf")
    facts = {
        "architecture": "qwen3_moe",
        "hidden_size": 64,
        "num_heads": 2,
        "initializer_range": 0.15,
        "max_position_embeddings": 512,
    }
    facts["tie_word_embeddings"] = False
    texts = [
        {"role": "user", "content": text} for text in ("Which way?", "Left", "Down", "Right", "Up", "one two three a b")
    ]
    folder: Path = source.HfModelSource(None, ModelSourceContext(cache=place, texts=lambda: texts)).prepare(
        {"recipe": {**facts, "seed": seed}}
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    place = tmp_path_factory.mktemp("experts")
    return lambda seed: expert(place, seed)


@pytest.fixture(scope="module")
def backend(run: Run, folders: Callable[[int], Path]) -> Iterator[SglangBackend]:
    from turnwise_hf.chat import HfChat

    async def build() -> SglangBackend:
        config = SglangConfig(python=fixtures.interpreter(), start_timeout=LONGEST)
        return SglangBackend(config, fixtures.context(model=folders(0), chat=HfChat(folders(0))))

    built = run(build())
    yield built
    run(built.close())


def off(run: Run, backend: SglangBackend, folder: Path) -> float:
    """The largest difference of a log-prob from that of a plain forward pass of the model in `folder`, over answers at
    two temperatures."""
    largest = 0.0
    for seed, temperature in enumerate((0.7, 1.0)):
        request = Request(seed, GeneratingArgs(12, temperature), 12, (seed,), ids=int32((1, 12, 13, 14, 2)))
        answer = run(backend.generate(request))
        expected = fixtures.reference_logprobs(np.concatenate([request.ids, answer.ids]), temperature, folder)[
            -len(answer.ids) :
        ]
        largest = max(largest, float(np.abs(answer.logprobs - expected).max()))
    return largest


async def streamed(backend: SglangBackend, version: int, folder: Path) -> int:
    """The weights of the model in `folder` by shared memory, a decoder layer at a time."""
    model, sender = load_causal_lm(folder, "fp32", "eager"), Sender(1, LONGEST)
    named = to_checkpoint(model, model.state_dict().items())
    sending = asyncio.create_task(asyncio.to_thread(sender.send, buckets(named, 1)))
    try:
        return await backend.receive(Offer("shared_memory", version, sender.payload))
    finally:
        await asyncio.gather(sending, return_exceptions=True)


def test_log_probs_are_the_models_before_and_after_experts_come_one_by_one(
    run: Run, backend: SglangBackend, folders: Callable[[int], Path]
) -> None:
    assert off(run, backend, folders(0)) < CLOSE
    assert off(run, backend, folders(1)) > FAR
    assert run(streamed(backend, 1, folders(1))) == 1
    assert off(run, backend, folders(1)) < CLOSE
    assert run(backend.receive(Offer("safetensors", 2, {"folder": str(folders(0))}))) == 2
    assert off(run, backend, folders(0)) < CLOSE
