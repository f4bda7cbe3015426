"""Requests to a backend of its own loop, and what is asserted of the answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.data.trajectory import Generation, int32
from turnwise_hf import backend as backend_module
from turnwise_hf.backend import HfBackend
from turnwise_hf.config import HfConfig

T = TypeVar("T")


def with_backend(folder: Path, work: Callable[[HfBackend], Awaitable[T]], **context: Any) -> T:
    """`work(backend)` on an event loop of its own; nothing may hang."""

    async def main() -> T:
        backend = HfBackend(
            HfConfig(), InferenceContext(folder, None, **{"dtype": "fp32", "sequence_length": 64, **context})
        )
        try:
            return await asyncio.wait_for(work(backend), 60)
        finally:
            await backend.close()

    return asyncio.run(main())


def ask(
    seed: int = 0, ids: Any = (1, 12, 13, 14, 2), limit: int = 5, order: tuple[int, ...] = (), **args: Any
) -> Request:
    return Request(seed, GeneratingArgs(**args), limit, order or (seed,), ids=int32(ids))


async def together(backend: HfBackend, *requests: Request) -> list[Generation]:
    return list(await asyncio.gather(*map(backend.generate, requests)))


def plain_logprobs(model: Any, request: Request, generation: Generation, temperature: float = 1.0) -> np.ndarray:
    assert request.ids is not None
    assert generation.ids is not None
    ids = torch.tensor([*request.ids.tolist(), *generation.ids.tolist()])
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].double() / temperature
    chosen = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
    return chosen[len(request.ids) - 1 :].numpy()


def check(generation: Generation, model: Any, request: Request, temperature: float = 1.0) -> None:
    """The log-probs are those of a plain forward pass of `model`."""
    assert generation.logprobs is not None
    np.testing.assert_allclose(generation.logprobs, plain_logprobs(model, request, generation, temperature), atol=1e-5)


def long_one(folder: Path, **args: Any) -> tuple[Request, Generation]:
    """A request whose response has more than four tokens, and the response."""
    requests = [ask(seed, limit=8, **args) for seed in range(20)]
    generations = with_backend(folder, lambda backend: together(backend, *requests))
    return next((request, generation) for request, generation in zip(requests, generations) if len(generation.ids) > 4)  # type: ignore[arg-type]


class StepLog:
    """Lets a test watch single tokens: counts the gate's calls, and may stop the sampling thread at one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int) -> None:
        self.calls, self.reached, self.go = 0, threading.Event(), threading.Event()
        original = backend_module.Worker.checkpoint

        def watched(worker: Any, *rest: Any) -> None:
            self.calls += 1
            if self.calls == stop_at:
                self.reached.set()
                assert self.go.wait(30)
            original(worker, *rest)

        monkeypatch.setattr(backend_module.Worker, "checkpoint", watched)
