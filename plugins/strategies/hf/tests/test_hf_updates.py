"""Weights that come: from a folder, shared with the trainer, or streamed; and none of an update that breaks off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_cases import StepLog, ask, check, long_one, plain_logprobs, with_backend

from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError, TrainerError
from turnwise_hf.backend import HfBackend
from turnwise_torch.broadcast import Hub
from turnwise_torch.models import load_causal_lm
from turnwise_torch.shared import lookup, publish, withdraw
from turnwise_torch.stream import Sender, buckets


def test_weights_from_a_folder_serve_under_their_version(make: Callable[..., Path], folder: Path) -> None:
    other = make(seed=8)
    request = ask(1)

    async def work(backend: HfBackend) -> tuple[Generation, Generation]:
        before = await backend.generate(request)
        assert await backend.receive(Offer("safetensors", 6, {"folder": str(other)})) == 6
        return before, await backend.generate(request)

    before, after = with_backend(folder, work)
    check(before, load_causal_lm(folder, "fp32", "sdpa"), request)
    check(after, load_causal_lm(other, "fp32", "sdpa"), request)
    assert after.versions is not None
    assert set(after.versions.tolist()) == {6}


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_weights_that_arrive_in_the_middle_sample_the_rest(
    make: Callable[..., Path], folder: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    other = make(seed=8)
    request, _ = long_one(folder, temperature=temperature)
    log = StepLog(monkeypatch, stop_at=3)

    async def work(backend: HfBackend) -> Generation:
        task = asyncio.create_task(backend.generate(request))
        await asyncio.to_thread(log.reached.wait, 30)
        receiving = asyncio.create_task(backend.receive(Offer("safetensors", 1, {"folder": str(other)})))
        await asyncio.sleep(0.02)
        log.go.set()
        assert await receiving == 1
        return await task

    generation = with_backend(folder, work)
    assert generation.versions is not None
    assert generation.versions[:3].tolist() == [0, 0, 1]
    old, new = (
        plain_logprobs(load_causal_lm(path, "fp32", "sdpa"), request, generation, temperature)
        for path in (folder, other)
    )
    assert generation.logprobs is not None
    np.testing.assert_allclose(generation.logprobs, np.where(generation.versions == 0, old, new), atol=1e-5)


def test_shared_weights_are_the_trainers_own_under_its_lock_and_its_mode_comes_back(folder: Path) -> None:
    trainer = load_causal_lm(folder, "fp32", "sdpa").train()
    key = publish(trainer)
    request = ask(1)

    async def work(backend: HfBackend) -> list[Generation]:
        assert await backend.receive(Offer("shared", 1, {"key": key})) == 1
        generations = [await backend.generate(request)]
        lock = lookup(key).lock
        with lock:
            task = asyncio.create_task(backend.generate(request))
            await asyncio.sleep(0.05)
            assert not task.done()
            with torch.no_grad():
                trainer.model.embed_tokens.weight.mul_(-0.5)  # type: ignore[union-attr,operator]
        generations.append(await task)
        assert await backend.receive(Offer("shared", 2, {"key": key})) == 2
        generations.append(await backend.generate(request))
        assert trainer.training
        assert lock.acquire(blocking=False)
        lock.release()
        return generations

    before, after, again = with_backend(folder, work)
    withdraw(key)
    check(before, load_causal_lm(folder, "fp32", "sdpa"), request)
    check(after, trainer.eval(), request)
    check(again, trainer, request)
    assert [set(generation.versions.tolist()) for generation in (before, after, again)] == [{1}, {1}, {2}]  # type: ignore[union-attr]


def test_a_folder_received_after_shared_weights_leaves_the_trainers_alone(
    make: Callable[..., Path], folder: Path
) -> None:
    trainer = load_causal_lm(folder, "fp32", "sdpa")
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    key = publish(trainer)

    async def work(backend: HfBackend) -> None:
        await backend.receive(Offer("shared", 1, {"key": key}))
        await backend.receive(Offer("safetensors", 2, {"folder": str(make(seed=8))}))
        assert set((await backend.generate(ask())).versions.tolist()) == {2}  # type: ignore[union-attr]

    with_backend(folder, work)
    withdraw(key)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state_dict().items())


@pytest.fixture(params=["shared_memory", "process_group"])
def senders(request: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A transport that streams, and what makes the sender of one update."""
    hub = Hub("", torch.device("cpu"), 10)
    yield request.param, lambda: Sender(1, 10) if request.param == "shared_memory" else hub.sender(1)
    hub.close()


def send(model: torch.nn.Module, sender: Any, *without: str) -> threading.Thread:
    weights = [(name, tensor) for name, tensor in model.state_dict().items() if name not in without]
    thread = threading.Thread(target=sender.send, args=(buckets(weights, 10_000),))
    thread.start()
    return thread


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_streamed_weights_serve_in_the_backends_dtype(
    make: Callable[..., Path], folder: Path, dtype: str, senders: Any
) -> None:
    trainer = load_causal_lm(make(seed=8), dtype, "sdpa")
    transport, sender_of_one = senders

    async def work(backend: HfBackend) -> Generation:
        for version in (2, 3):
            sender = sender_of_one()
            thread = send(trainer, sender)
            assert await backend.receive(Offer(transport, version, sender.payload)) == version
            thread.join()
        return await backend.generate(request)

    request = ask()
    generation = with_backend(folder, work)
    assert set(generation.versions.tolist()) == {3}  # type: ignore[union-attr]
    check(generation, trainer.float(), request)


def test_an_update_that_breaks_off_never_serves_half_of_it(
    make: Callable[..., Path], folder: Path, senders: Any
) -> None:
    trainer = load_causal_lm(make(seed=8), "fp32", "sdpa")
    transport, sender_of_one = senders

    async def work(backend: HfBackend) -> None:
        sender = sender_of_one()
        thread = send(trainer, sender, "model.norm.weight")
        with pytest.raises(EngineError, match=r"lack 1 of the model's tensors, such as 'model\.norm\.weight'"):
            await backend.receive(Offer(transport, 3, sender.payload))
        thread.join()
        with pytest.raises(EngineError, match="half old and half new"):
            await backend.generate(ask())

    with_backend(folder, work)


def test_weights_of_another_model_end_the_trainers_sending_at_once(
    make: Callable[..., Path], folder: Path, senders: Any
) -> None:
    trainer = load_causal_lm(make(num_layers=3), "fp32", "sdpa")
    transport, sender_of_one = senders

    async def work(backend: HfBackend) -> None:
        sender = sender_of_one()
        sending = asyncio.create_task(asyncio.to_thread(sender.send, buckets(trainer.state_dict().items(), 10_000)))
        with pytest.raises(EngineError, match=r"the trainer sent 'model\.layers\.2.*, the model has none of that name"):
            await backend.receive(Offer(transport, 3, sender.payload))
        with pytest.raises(TrainerError, match="stopped reading the weights"):
            await asyncio.wait_for(sending, 5)

    with_backend(folder, work)


@pytest.mark.parametrize(
    ("offer", "message"),
    [
        (Offer("nccl", 1), "cannot receive weights by 'nccl'. Known: process_group, safetensors, shared"),
        (Offer("shared", 1, {"key": "nobody"}), "no shared model 'nobody'"),
        (Offer("safetensors", 1, {"folder": "/nowhere"}), "no safetensors weights"),
    ],
)
def test_an_offer_that_cannot_be_taken_is_one_line_and_the_old_weights_serve_on(
    folder: Path, offer: Offer, message: str
) -> None:
    async def work(backend: HfBackend) -> None:
        with pytest.raises(EngineError, match=message):
            await backend.receive(offer)
        assert set((await backend.generate(ask())).versions.tolist()) == {0}  # type: ignore[union-attr]

    with_backend(folder, work)
