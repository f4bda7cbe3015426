"""The drift detector of the trajectory manager."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from managers_fakes import ROOMY, ScriptedEnv, ScriptedSampler, WatchedChat, going, image_part, run

from turnwise.contracts.chat import Message
from turnwise.contracts.env_manager import ManagerContext
from turnwise_managers.config import TrajectoryConfig
from turnwise_managers.trajectory import TrajectoryManager


class Stripping(WatchedChat):
    """A template that leaves the thinking of earlier turns out."""

    def __init__(self) -> None:
        super().__init__()
        self.renderings = 0

    def render(self, messages: Sequence[Message], images: Sequence[np.ndarray] = (), tools: Any = None) -> np.ndarray:
        self.renderings += 1
        kept = [
            {**m, "content": re.sub(r"<think>.*?</think>", "", m["content"])} if m["role"] == "assistant" else m
            for m in messages
        ]
        return super().render(kept, images, tools)


def manager(**options: Any) -> TrajectoryManager:
    return TrajectoryManager(TrajectoryConfig(**{"detect_drift": True, **options}), ManagerContext("Tag", 10))


def drifts(texts: list[str], chat: WatchedChat | None = None, **options: Any) -> Any:
    env = ScriptedEnv("s0", going(*[f"s{k}" for k in range(1, len(texts) + 1)]))
    return run(
        manager(**options), env, ScriptedSampler(texts), evolve(ROOMY, max_turns=len(texts)), chat or WatchedChat()
    )


def test_a_template_that_keeps_everything_does_not_drift() -> None:
    played = drifts(
        ["<think>a</think>Up", "Down", "Left"],
        agent_system_template="sys",
        agent_template="Turn {turn_idx}: {observation}",
    )
    assert [turn.metrics["drift"] for turn in played.turns] == [0.0, 0.0, 0.0]
    assert played.metrics["drift"] == 0.0
    assert all("drift" not in turn.extras for turn in played.turns)


def test_turns_after_a_thinking_one_drift_where_the_template_strips_it() -> None:
    played = drifts(["Up", "<think>a</think>Down", "Left", "Up"], Stripping())
    assert [turn.metrics["drift"] for turn in played.turns] == [0.0, 0.0, 1.0, 1.0]
    assert played.metrics["drift"] == 0.5
    found = played.turns[2].extras["drift"]
    assert found["used"].startswith("<think>a</think>")
    assert found["rendered"].startswith("Down")
    before = played.turns[2].prompt_ids[: found["at"]]
    assert WatchedChat().decode(before).endswith("s1")  # the last that both have in common


def test_the_tokens_in_use_stay_those_that_were_sampled() -> None:
    texts = ["<think>a</think>Down", "Left"]
    with_, without = drifts(texts, Stripping()), drifts(texts, Stripping(), detect_drift=False)
    for one, other in zip(with_.turns, without.turns, strict=True):
        np.testing.assert_array_equal(one.prompt_ids, other.prompt_ids)


def test_it_is_off_unless_asked_for_and_then_costs_no_rendering() -> None:
    chat = Stripping()
    played = drifts(["<think>a</think>Down", "Left", "Up"], chat, detect_drift=False)
    assert chat.renderings == 1
    assert "drift" not in played.metrics
    assert TrajectoryConfig().detect_drift is False


def test_a_response_cut_by_its_limit_does_not_drift_when_the_template_closes_it_as_the_rendering_does() -> None:
    env = ScriptedEnv("s0", going("s1", "s2"))
    played = run(manager(), env, ScriptedSampler(["abcdef", "x"]), evolve(ROOMY, max_turns=2, max_new_tokens=3))
    assert played.turns[0].finish == "length"
    assert played.metrics["drift"] == 0.0


def test_images_are_rendered_with_their_turns() -> None:
    chat = WatchedChat()
    env = ScriptedEnv([image_part(1)], going([image_part(2)], "s2"))
    played = run(manager(), env, ScriptedSampler(["a", "b"]), evolve(ROOMY, max_turns=2), chat)
    assert played.metrics["drift"] == 0.0
    assert len(chat.images[-1]) == 2


@pytest.mark.parametrize(("texts", "expected"), [(["ab", "c"], [0.0, 1.0]), (["", "c"], [0.0, 0.0])])
def test_one_assistant_message_drifts_by_the_stop_tokens_inside(texts: list[str], expected: list[float]) -> None:
    """`history: single_turn`: a sampled stop token stays in the sequence, and no text says so."""
    played = drifts(texts, history="single_turn")
    assert [turn.metrics["drift"] for turn in played.turns] == expected


def test_a_backend_of_messages_has_no_tokens_to_compare() -> None:
    env = ScriptedEnv("s0", going("s1", "s2"))
    played = run(manager(), env, ScriptedSampler(["a", "b"], takes="messages"), evolve(ROOMY, max_turns=2))
    assert "drift" not in played.metrics


def test_an_episode_without_a_turn_has_no_share() -> None:
    played = run(manager(), ScriptedEnv("much too long"), ScriptedSampler([]), evolve(ROOMY, sequence_length=5))
    assert (played.turns, played.metrics) == ((), {})
