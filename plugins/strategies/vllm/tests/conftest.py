"""The real engine in this process, started once; models whose weights it is given; and a sender for them."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.contracts.train import Offer

MISSING = "vllm is not installed (extra: turnwise-vllm[vllm] or [cpu])"


class Lab:
    """One in-process backend on one event loop, and what the tests do with it."""

    def __init__(self) -> None:
        from turnwise_vllm.backend import VllmBackend
        from turnwise_vllm.config import VllmConfig
        from turnwise_vllm.fixtures import model_context

        self.runner = asyncio.Runner()
        self.context = model_context()
        # Nothing is read from disk: whatever is right below came by a weight update.
        self.backend = VllmBackend(VllmConfig(load_format="dummy", block_size=32), self.context)
        self.version = 0

    def model(self, seed: int) -> Any:
        """A random model of the folder's shape: biases and norms too, which a fresh one has all alike."""
        import torch

        from turnwise_torch.models import load_causal_lm

        model = load_causal_lm(self.context.model, "fp32", "eager")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        return model

    async def send(self, named: Any, size: int = 20_000, sender: Any = None) -> int:
        """Stream named tensors as the next version, by shared memory or what `sender` sends by; its thread ends with it."""
        from turnwise_torch.stream import Sender, buckets

        self.version += 1
        transport = "shared_memory" if sender is None else "process_group"
        sender = sender or Sender(self.backend.receivers, 120)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                sender.send(buckets(named, size))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            return await self.backend.receive(Offer(transport, self.version, sender.payload))
        finally:
            sender.close()
            thread.join(30)

    def serve(self, model: Any) -> int:
        """Send all of a model's weights."""
        return self.runner.run(self.send(model.state_dict().items()))

    def request(self, seed: int = 0, tokens: int = 8, length: int = 9, prompt: int = 0, **args: Any) -> Request:
        """A random prompt (`prompt` chooses it) of `length` ids."""
        ids = np.random.default_rng(prompt).integers(3, 20, length).astype(np.int32)
        return Request(seed, GeneratingArgs(tokens, **args), tokens, (0, 0, seed, 0, 0), ids=ids)

    def ask(self, *requests: Request) -> list[Any]:
        """All of them at once."""

        async def scene() -> list[Any]:
            return await asyncio.gather(*[self.backend.generate(request) for request in requests])

        return self.runner.run(scene())

    def off(self, model: Any, request: Request, answer: Any, chosen: slice | np.ndarray = slice(None)) -> float:
        """How far the answer's log-probs are from those of `model`, at most, over the `chosen` tokens."""
        from turnwise_vllm.fixtures import log_probs

        expected = log_probs(model, np.concatenate([request.ids, answer.ids]), request.args.temperature)[-len(answer.ids) :]
        return float(np.abs(answer.logprobs - expected)[chosen].max())


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The engine in this process."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip(MISSING)
    lab = Lab()
    yield lab
    lab.runner.run(lab.backend.close())
    lab.runner.close()


@pytest.fixture(scope="session")
def models(lab: Lab) -> Callable[[int], Any]:
    """`models(seed)`: a random model, made once."""
    made: dict[int, Any] = {}
    return lambda seed: made.setdefault(seed, None) or made.update({seed: lab.model(seed)}) or made[seed]
