"""Weights in mid-generation, with the real engine in this process: what was sampled stays, and the rest is what the new
weights make of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from vllm_cases import CLOSE, FAR, IN_PROCESS, across, under_way

from turnwise.contracts.inference import Request

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240), *IN_PROCESS]
TOKENS = 350
"""Of a response: enough that on a busy machine, too, it goes on while weights come."""


@pytest.fixture(scope="module")
def busy(make_lab: Callable[..., Any]) -> Iterator[Any]:
    """An engine that reads prompts in parts, and in which no token ends a response."""
    lab = make_lab({"max_num_batched_tokens": 64, "max_num_seqs": 16}, sequence_length=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab.context.chat, "stop_ids", ())
        yield lab
    lab.close()


@pytest.fixture(scope="module")
def two(busy: Any) -> tuple[Any, Any]:
    """Two models."""
    return busy.model(1), busy.model(2)


def requests(lab: Any, temperature: float, tokens: int = TOKENS) -> list[Request]:
    """Short prompts, and long ones with a common beginning."""
    return [
        lab.request(seed, tokens=tokens, length=length, prompt=length // 100, temperature=temperature)
        for seed, length in enumerate((5, 9, 140, 141, 70))
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_each_token_has_the_version_and_the_log_prob_of_the_weights_that_sampled_it(
    busy: Any, two: tuple[Any, Any], temperature: float
) -> None:
    old, new = two
    busy.serve(old)
    first = busy.version
    asked = requests(busy, temperature)
    for request, answer in zip(asked, across(busy, asked, new, old, new), strict=True):
        assert len(answer.ids) == TOKENS
        assert set(answer.versions.tolist()) == set(range(first, first + 4))
        assert (np.diff(answer.versions) >= 0).all()
        for version, model, other in zip(range(first, first + 4), (old, new) * 2, (new, old) * 2, strict=True):
            assert busy.off(model, request, answer, answer.versions == version) < CLOSE
            assert busy.off(other, request, answer, answer.versions == version) > FAR


def test_a_response_goes_on_as_one_that_begins_with_what_was_sampled(busy: Any, two: tuple[Any, Any]) -> None:
    old, new = two
    busy.serve(old)
    asked = requests(busy, 0.0)
    answers = across(busy, asked, new)
    before = [int((answer.versions < busy.version).sum()) for answer in answers]
    begun = [
        evolve(request, ids=np.concatenate([request.ids, answer.ids[:n]]), max_new_tokens=TOKENS - n)
        for request, answer, n in zip(asked, answers, before, strict=True)
    ]
    for answer, n, fresh in zip(answers, before, busy.ask(*begun), strict=True):
        assert 5 <= n < TOKENS
        assert answer.ids[n:].tolist() == fresh.ids.tolist()
        np.testing.assert_allclose(answer.logprobs[n:], fresh.logprobs, atol=CLOSE, rtol=0)


def test_a_seed_gives_the_same_tokens_with_equal_weights_in_between(busy: Any, two: tuple[Any, Any]) -> None:
    busy.serve(two[0])
    asked = requests(busy, 1.0)
    whole = busy.ask(*asked)
    for answer, alone in zip(across(busy, asked, two[0], two[0]), whole, strict=True):
        assert len(set(answer.versions.tolist())) == 3
        assert answer.ids.tolist() == alone.ids.tolist()


def test_a_request_that_comes_in_a_pause_is_sampled_with_the_new_weights_alone(busy: Any, two: tuple[Any, Any]) -> None:
    old, new = two
    busy.serve(old)
    running, late = requests(busy, 1.0)[2:4]

    async def scene() -> list[Any]:
        task = asyncio.create_task(busy.backend.generate(running))
        await under_way(busy, 1, 5)
        await busy.backend.pause()
        beside = asyncio.create_task(busy.backend.generate(late))
        await under_way(busy, 2, 0)
        await busy.send(new.state_dict().items())
        await busy.backend.resume()
        return await asyncio.gather(task, beside)

    first, second = busy.runner.run(scene())
    assert set(first.versions.tolist()) == {busy.version - 1, busy.version}
    assert set(second.versions.tolist()) == {busy.version}
    assert busy.off(new, late, second) < CLOSE
