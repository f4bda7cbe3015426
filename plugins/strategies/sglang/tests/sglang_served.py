"""What tests of the session's server share: requests, weights by every transport, and responses that are on their
way."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation, int32
from turnwise.errors import EngineError
from turnwise_sglang import fixtures
from turnwise_sglang.backend import SglangBackend
from turnwise_torch.broadcast import Broadcast, Hub
from turnwise_torch.models import load_causal_lm
from turnwise_torch.stream import Sender, buckets

ATOL = 1e-4
NEVER = "no text of the model"
ROUNDS = 6
"""How often something is done to responses on their way until it meets one: they may end first."""


def ask(seed: int = 0, limit: int = 40, ids: tuple[int, ...] = (1, 12, 13, 14, 2), **args: Any) -> Request:
    return Request(seed, GeneratingArgs(**{"max_new_tokens": limit, **args}), limit, (seed,), ids=int32(ids))


async def together(backend: SglangBackend, *requests: Request) -> list[Generation]:
    return list(await asyncio.gather(*map(backend.generate, requests)))


async def longest_first(backend: SglangBackend, requests: Sequence[Request]) -> dict[Request, Generation]:
    """The requests with their answers, in an order for `under_way`: the first answer is the longest, and comes as a
    stream."""
    answers = zip(requests, await together(backend, *requests), strict=True)
    (first, longest), *others = sorted(answers, key=lambda pair: -len(pair[1].ids))
    return {evolve(first, args=evolve(first.args, stop_strings=(NEVER,))): longest, **dict(others)}


async def long_ones(backend: SglangBackend, temperature: float = 0.0) -> dict[Request, Generation]:
    """As `longest_first`: the longest has hundreds of tokens, so that weights can meet it on its way."""
    return await longest_first(backend, [ask(k, 480, (k,), temperature=temperature) for k in range(10, 22)])


async def under_way(
    backend: SglangBackend, requests: Sequence[Request], tokens: int = 8
) -> list[asyncio.Task[Generation]]:
    """The tasks of requests of `longest_first`, as soon as the first response has so many tokens."""
    assert backend.links.current is not None
    api, reached = backend.links.current.api, asyncio.Event()
    stream = api.stream

    async def observed(path: str, body: Mapping[str, Any], timeout: float) -> AsyncIterator[dict[str, Any]]:
        async for answer in stream(path, body, timeout):
            if len(answer["output_ids"]) >= tokens:
                reached.set()
            yield answer

    api.stream = observed  # type: ignore[method-assign]
    tasks = [asyncio.create_task(backend.generate(request)) for request in requests]
    seen = asyncio.create_task(reached.wait())
    await asyncio.wait({seen, tasks[0]}, return_when=asyncio.FIRST_COMPLETED)
    del api.stream
    assert reached.is_set(), tasks[0]
    return tasks


def differences(request: Request, answer: Generation, temperature: float, seed: int) -> np.ndarray:
    """|log-prob − that of a plain forward pass of the model of `seed`| for every token."""
    assert request.ids is not None and answer.ids is not None and answer.logprobs is not None
    expected = fixtures.reference_logprobs(np.concatenate([request.ids, answer.ids]), temperature, fixtures.model(seed))
    return np.abs(answer.logprobs - expected[len(request.ids) :])


def parity(life: Any, model: int, temperature: float) -> None:
    requests = [ask(seed, temperature=temperature) for seed in range(4)]
    for request, answer in zip(requests, life.run(together(life.backend, *requests)), strict=True):
        assert differences(request, answer, temperature, model).max() < ATOL


def folder_offer(version: int, model: int) -> Offer:
    """The weights of the model of `model`, as files."""
    return Offer("safetensors", version, {"folder": str(fixtures.model(model))})


async def sent(backend: SglangBackend, transport: str, version: int, model: int) -> int:
    """The weights of the model of `model` by `transport`."""
    if transport == "safetensors":
        return await backend.receive(folder_offer(version, model))
    if transport == "shared_memory":
        return await streamed(backend, version, model)
    hub = Hub("", torch.device("cpu"), 60.0)
    try:
        return await broadcast(backend, hub.sender(1), version, model)
    finally:
        hub.close()


@functools.cache
def state(model: int) -> dict[str, torch.Tensor]:
    """The weights of the model of `model`."""
    tensors: dict[str, torch.Tensor] = load_causal_lm(fixtures.model(model), "fp32", "eager").state_dict()
    return tensors


async def streamed(
    backend: SglangBackend, version: int, model: int, named: list[tuple[str, torch.Tensor]] | None = None
) -> int:
    """The weights of the model of `model` by shared memory, a decoder layer at a time."""
    sender = Sender(1, 240.0)
    offered = list(buckets(state(model).items() if named is None else named, 1))
    assert len(offered) > 2 or named is not None
    sending = asyncio.create_task(asyncio.to_thread(sender.send, offered))
    version = await backend.receive(Offer("shared_memory", version, sender.payload))
    await sending
    return version


async def broadcast(backend: SglangBackend, sender: Broadcast, version: int, model: int) -> int:
    """The weights of the model of `model` by a process group, a decoder layer at a time."""
    sending = asyncio.create_task(asyncio.to_thread(sender.send, buckets(state(model).items(), 1)))
    try:
        return await backend.receive(Offer("process_group", version, sender.payload))
    except EngineError as error:
        (outcome,) = await asyncio.gather(sending, return_exceptions=True)
        error.add_note(f"the trainer's side: {outcome!r}")
        raise
    finally:
        await asyncio.gather(sending, return_exceptions=True)


async def divided(
    backend: SglangBackend, transport: str, temperature: float
) -> tuple[int, list[tuple[Request, Generation, Generation]]]:
    """Responses of the model of 0 that the weights of 1 meet on their way: the new version, each request with its
    answer undisturbed and divided."""
    await sent(backend, "safetensors", 0, 0)
    whole = await long_ones(backend, temperature)
    for version in range(1, 2 * ROUNDS, 2):
        tasks = await under_way(backend, list(whole))
        assert await sent(backend, transport, version, 1) == version
        answers = await asyncio.gather(*tasks)
        of = zip(whole.items(), answers, strict=True)
        if found := [(*pair, answer) for pair, answer in of if len(set(answer.versions.tolist())) == 2]:
            return version, found
        await sent(backend, "safetensors", version + 1, 0)
    pytest.fail("the weights met no response on its way")


async def goes_on(backend: SglangBackend, transport: str, temperature: float) -> None:
    """Weights come by `transport` between two tokens: tokens before the cut are the old model's, those after it the new
    one's, which it samples after their ids."""
    version, found = await divided(backend, transport, temperature)
    counts = [int((answer.versions < version).sum()) for _, _, answer in found]
    rest = [
        evolve(
            request,
            ids=np.concatenate([request.ids, answer.ids[:count]]),
            max_new_tokens=request.max_new_tokens - count,
        )
        for (request, _, answer), count in zip(found, counts, strict=True)
    ]
    farthest = 0.0
    for (request, undisturbed, answer), count, after in zip(found, counts, await together(backend, *rest), strict=True):
        assert answer.versions.tolist() == [version - 1] * count + [version] * len(after.ids)
        assert answer.ids.tolist() == [*undisturbed.ids.tolist()[:count], *after.ids.tolist()]
        assert (answer.finish, set(after.versions.tolist())) == (after.finish, {version})
        old, new = (differences(request, answer, temperature or 1.0, model) for model in (0, 1))
        assert max(old[:count].max(), new[count:].max()) < ATOL
        farthest = max(farthest, old[count:].max())
    assert farthest > 0.1
