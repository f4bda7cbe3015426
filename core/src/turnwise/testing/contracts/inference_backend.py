"""What every backend keeps: log-probs as they are defined, one answer for one seed, versions, a life that can be paused
and closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from turnwise.contracts.inference import BackendCapabilities, GeneratingArgs, Request
from turnwise.data.trajectory import Generation, int32
from turnwise.errors import Problem
from turnwise.testing.subject import Subject

KIND = "inference_backend"
# Not 1, or a backend whose log-probs are before the temperature would not be noticed.
TEMPERATURE = 0.7
NEW_TOKENS = 6
PROMPTS = 4
# Seconds: the first request may start an engine.
LONGEST = 120.0
# Tokens of responses that weights meet on their way, and how many updates come meanwhile at most.
MANY_TOKENS = 64
UPDATES = 8


def build(implementation: Subject) -> Any:
    """The supplied backend, or a new one."""
    return implementation.supplied.get("backend") or implementation.build(implementation.need("context"))


def prompts(implementation: Subject) -> list[np.ndarray]:
    """Prompts of different lengths: rendered by the chat where there is one, else random ids."""
    chat = implementation.need("context").chat
    if chat is not None:
        texts = ["a", "one two", "one two three", "a b"]
        return [chat.render([{"role": "user", "content": text}]) for text in texts[:PROMPTS]]
    draw = np.random.default_rng(0)
    return [int32(draw.integers(1, implementation.supplied.get("vocab_size", 64), 3 + k)) for k in range(PROMPTS)]


def requests(
    implementation: Subject, backend: Any, seed: int = 0, temperature: float = TEMPERATURE, tokens: int = NEW_TOKENS
) -> list[Request]:
    """One request per prompt, or those that the author supplied for a backend that takes messages."""
    if backend.input == "messages":
        make = implementation.need("request")
        return [make(seed + k) for k in range(PROMPTS)]
    args = GeneratingArgs(max_new_tokens=tokens, temperature=temperature)
    return [
        Request(seed + k, args, tokens, order=(0, 0, k, 0, 0), ids=ids) for k, ids in enumerate(prompts(implementation))
    ]


async def answers(backend: Any, asked: Sequence[Request]) -> list[Generation]:
    """All requests at once, as a scheduler would send them."""
    backend.live(len(asked))
    try:
        return await asyncio.wait_for(asyncio.gather(*[backend.generate(request) for request in asked]), LONGEST)
    finally:
        # Tests ask the same backend again with fewer requests, and it would wait for as many as before.
        backend.live(0)


def ask(runner: asyncio.Runner, backend: Any, asked: Sequence[Request]) -> list[Generation]:
    """The answers to all requests, asked at the same time."""
    return runner.run(answers(backend, asked))


def test_answers_have_the_shape_of_the_contract(implementation: Subject, runner: asyncio.Runner) -> None:
    """Ids int32 [n], versions [n], log-probs float32 [n] where it has them."""
    backend = build(implementation)
    for answer in ask(runner, backend, requests(implementation, backend)):
        assert isinstance(answer.text, str)
        assert answer.finish in ("stop", "length")
        if answer.ids is None:
            assert backend.input == "messages", "only a backend that takes messages may leave out the ids."
            continue
        assert answer.ids.dtype == np.int32
        assert 1 <= len(answer.ids) <= NEW_TOKENS
        assert answer.versions is not None
        assert answer.versions.shape == answer.ids.shape
        assert answer.logprobs is None or (
            answer.logprobs.shape == answer.ids.shape and answer.logprobs.dtype == np.float32
        )
    runner.run(backend.close())


def test_what_it_declares_is_what_it_does(implementation: Subject) -> None:
    """Its input, its capabilities, and somebody who reads an offer of each transport."""
    backend, context = build(implementation), implementation.need("context")
    assert isinstance(implementation.capabilities(BackendCapabilities), BackendCapabilities)
    assert backend.input in ("ids", "messages")
    assert all(
        isinstance(problem, Problem) for problem in implementation.entry.target().check(implementation.config, context)
    )
    for transport in implementation.transports(context):
        assert backend.receivers(transport) >= 1, f"nobody reads an offer of {transport!r}, which it says it takes."


def test_log_probs_are_those_of_the_reference(implementation: Subject, runner: asyncio.Runner) -> None:
    """Of the distribution that was sampled from, temperature included."""
    backend = build(implementation)
    if backend.input == "messages":
        return  # it has no log-probs to compare
    reference, atol = implementation.need("reference_logprobs"), implementation.supplied.get("atol", 1e-3)
    # Greedy sampling has no temperature to divide by: its log-probs are those of temperature 1.
    for temperature, used in ((TEMPERATURE, TEMPERATURE), (0.0, 1.0)):
        asked = requests(implementation, backend, temperature=temperature)
        for request, answer in zip(asked, ask(runner, backend, asked)):
            assert request.ids is not None
            assert answer.ids is not None
            if answer.logprobs is None:
                continue
            expected = reference(np.concatenate([request.ids, answer.ids]), used)[-len(answer.ids) :]
            message = (
                f"log-probs at temperature {temperature} are not of log_softmax(logits / {used}) over the whole"
                " vocabulary."
            )
            np.testing.assert_allclose(answer.logprobs, expected, atol=atol, rtol=0, err_msg=message)
    runner.run(backend.close())


def test_one_seed_gives_one_answer_alone_or_among_others(implementation: Subject, runner: asyncio.Runner) -> None:
    """What else is in the batch does not matter."""
    backend = build(implementation)
    if "backend" in implementation.supplied:
        return  # a built backend has a reader behind it, not a seed
    asked = requests(implementation, backend)
    together = [answer.text for answer in ask(runner, backend, asked)]
    again = [answer.text for answer in ask(runner, backend, asked)]
    alone = [ask(runner, backend, [request])[0].text for request in asked]
    assert together == again, "the same requests were answered otherwise the second time."
    assert together == alone, "an answer depends on the requests beside it."
    # Several seeds, as one may give the same short answers by chance.
    others = [
        [a.text for a in ask(runner, backend, requests(implementation, backend, seed=100 * k))] for k in range(1, 5)
    ]
    assert any(other != together for other in others), "other seeds change nothing."
    runner.run(backend.close())


def test_a_weight_update_is_seen_in_the_versions(implementation: Subject, runner: asyncio.Runner) -> None:
    """Staleness is counted by them."""
    backend = build(implementation)
    if not implementation.transports(implementation.need("context")):
        return  # a player has no weights
    offer = implementation.need("offer")
    for version in (1, 2):
        assert runner.run(backend.receive(offer(version))) == version, (
            "receive must return the version that now serves."
        )
        for answer in ask(runner, backend, requests(implementation, backend)):
            assert answer.versions is not None
            assert set(answer.versions.tolist()) == {version}
    runner.run(backend.close())


def test_weights_that_come_between_two_tokens_sample_the_rest(implementation: Subject, runner: asyncio.Runner) -> None:
    """Each token has the version that sampled it."""
    backend = build(implementation)
    if not implementation.capabilities(BackendCapabilities).updates_between_tokens:
        return  # nobody offers it weights while a response is on its way
    offers = (implementation.need("offer"), implementation.need("other_offer"))
    references = (implementation.need("reference_logprobs"), implementation.need("other_logprobs"))
    atol = implementation.supplied.get("atol", 1e-3)
    asked = requests(implementation, backend, tokens=MANY_TOKENS)

    async def scene() -> list[Generation]:
        await backend.receive(offers[0](0))
        begun = time.perf_counter()
        await answers(backend, asked)
        share = (time.perf_counter() - begun) / (UPDATES + 1)
        task = asyncio.create_task(answers(backend, asked))
        for version in range(1, UPDATES + 1):
            # Spread over what they took undisturbed; wherever an update meets them, the tokens must be right.
            if (await asyncio.wait({task}, timeout=share))[0]:
                break
            await backend.receive(offers[version % 2](version))
        return await task

    for request, answer in zip(asked, runner.run(scene())):
        assert request.ids is not None
        assert answer.ids is not None
        assert answer.versions is not None
        assert (np.diff(answer.versions) >= 0).all(), "versions of later tokens are older."
        if answer.logprobs is None:
            continue
        whole = np.concatenate([request.ids, answer.ids])
        expected = [reference(whole, TEMPERATURE)[-len(answer.ids) :] for reference in references]
        message = "a token's log-prob is not that of the weights of its version, given all tokens before it."
        np.testing.assert_allclose(
            answer.logprobs,
            np.where(answer.versions % 2 == 0, *expected),
            atol=atol,
            rtol=0,
            err_msg=message,
        )
    runner.run(backend.close())


def test_a_paused_backend_keeps_requests_until_it_resumes(implementation: Subject, runner: asyncio.Runner) -> None:
    """None is answered by half of new weights."""
    backend = build(implementation)
    if not implementation.transports(implementation.need("context")):
        return  # a player has no weights and is never paused

    async def scene() -> list[Generation]:
        await backend.pause()
        task = asyncio.create_task(answers(backend, requests(implementation, backend)))
        # Time enough to answer, for a backend that does not keep them.
        await asyncio.sleep(0.2)
        assert not task.done(), "a paused backend went on."
        await backend.resume()
        return await task

    assert len(runner.run(scene())) == PROMPTS
    runner.run(backend.close())


def test_it_sleeps_wakes_and_closes_twice(implementation: Subject, runner: asyncio.Runner) -> None:
    """And answers once it is awake again."""
    backend = build(implementation)
    runner.run(backend.sleep())
    runner.run(backend.wake("weights"))
    runner.run(backend.wake("cache"))
    assert len(ask(runner, backend, requests(implementation, backend))) == PROMPTS
    runner.run(backend.close())
    runner.run(backend.close())
