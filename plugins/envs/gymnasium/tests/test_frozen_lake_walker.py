"""The walker: toward the goal, by the request's seed, blind to holes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.contracts.train import Offer
from turnwise.errors import EngineError
from turnwise_gymnasium.fixtures import walker_fixture
from turnwise_gymnasium.frozen_lake import ACTIONS, FrozenLake
from turnwise_gymnasium.walker import FrozenLakeWalker

WALKER = FrozenLakeWalker(None, InferenceContext(None, None))


def ask(content: Any, seed: int = 0, actions: tuple[str, ...] = ACTIONS, walker: FrozenLakeWalker = WALKER) -> str:
    messages = ({"role": "system", "content": "The goal is 9 up 9 left."}, {"role": "user", "content": content})
    return asyncio.run(walker.generate(Request(seed, GeneratingArgs(), 8, messages=messages, actions=actions))).text


@pytest.mark.parametrize(
    ("sentence", "useful"),
    [
        ("The goal is 2 down 1 right.", {"Down", "Right"}),
        ("The goal is 1 up 3 left.", {"Up", "Left"}),
        ("The goal is 3 up.", {"Up"}),
        ("The goal is 12 left.", {"Left"}),
    ],
)
def test_it_answers_with_the_directions_of_the_goal(sentence: str, useful: set[str]) -> None:
    assert {ask(f"Turn 1.\n{sentence}\nHoles: Down Right.", seed) for seed in range(30)} == useful


def test_the_last_sentence_of_the_last_user_message_counts() -> None:
    assert ask("Before: The goal is 2 down.\nNow: The goal is 1 left.\nHoles: none.") == "Left"


def test_content_parts_are_read() -> None:
    assert ask([{"type": "text", "text": "The goal is 1 up."}, {"type": "image", "image": None}]) == "Up"


def test_the_seed_decides_and_global_random_state_is_untouched() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    text = "The goal is 2 down 1 right."
    assert [ask(text, seed) for seed in range(20)] == [ask(text, seed) for seed in range(20)]
    assert random.random() == expected


def test_it_falls_back_to_a_legal_action() -> None:
    assert ask("The goal is 1 up.", actions=("Left",)) == "Left"
    assert {ask("The goal is 1 up.", seed, ("Left", "Down")) for seed in range(20)} == {"Left", "Down"}
    assert ask("The goal is 1 up.", actions=()) == "Up"


def test_without_the_sentence_it_refuses_in_one_line() -> None:
    with pytest.raises(EngineError, match=r"frozen_lake_walker.*observation: relative") as caught:
        ask("P _ _\n_ _ G")
    assert "\n" not in str(caught.value)


def test_the_generation_is_text_alone_and_the_rest_of_the_contract_answers() -> None:
    fixture = walker_fixture()
    walker = FrozenLakeWalker(fixture["config"], fixture["context"])

    async def use() -> None:
        generation = await walker.generate(fixture["request"](3))
        assert generation.text in ("Down", "Right")
        assert (generation.ids, generation.logprobs, generation.versions, generation.finish) == (
            None,
            None,
            None,
            "stop",
        )
        walker.live(3)
        for call in (walker.pause, walker.resume, walker.sleep):
            await call()
        for what in ("weights", "cache"):
            await walker.wake(what)
        for _ in range(2):
            await walker.close()
        await walker.abort(fixture["request"](0))
        with pytest.raises(EngineError, match="no weights"):
            await walker.receive(Offer("shared", 1))

    asyncio.run(use())
    assert (walker.input, walker.transports(None, InferenceContext(None, None))) == ("messages", ())


def test_it_succeeds_as_often_as_measured() -> None:
    """About 72 % on 4×4 with random start and goal within eight steps; every map is won or ends in a hole."""
    env = FrozenLake(random_start_goal=True, observation="relative", max_steps=8)

    async def episode(seed: int) -> bool:
        text, info = env.reset(seed=seed)
        for turn in range(8):
            request = Request(
                seed * 100 + turn,
                GeneratingArgs(),
                8,
                messages=({"role": "user", "content": text},),
                actions=tuple(info["actions"]),
            )
            text, _, terminated, _, info = env.step((await WALKER.generate(request)).text)
            if terminated:
                break
        assert terminated
        return bool(info["success"])

    async def all_episodes() -> list[bool]:
        return [await episode(seed) for seed in range(1000)]

    assert sum(asyncio.run(all_episodes())) / 1000 == pytest.approx(0.72, abs=0.05)
