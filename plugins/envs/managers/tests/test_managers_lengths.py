"""Regressions on lengths, appended tokens and the ends of episodes, for step-wise samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from managers_fakes import ROOMY, ScriptedEnv, ScriptedSampler, WatchedChat, going, prompt, run, text_ids

from turnwise.contracts.chat import Message
from turnwise.contracts.env_manager import Limits, ManagerContext
from turnwise.data.batch import build_batch
from turnwise.data.trajectory import int32
from turnwise.testing.fake_model import END, FakeChat
from turnwise_managers.config import StepwiseConfig, TrajectoryConfig
from turnwise_managers.stepwise import StepwiseManager
from turnwise_managers.trajectory import TrajectoryManager

BOTH = pytest.mark.parametrize("merge", [False, True], ids=["apart", "merged"])


def manager(merge: bool, **options: Any) -> StepwiseManager:
    return StepwiseManager(StepwiseConfig(merge_steps=merge, **options), ManagerContext("Tag", 10))


class Spelling(WatchedChat):
    """Writes an earlier response with a space after every letter: re-tokenised, it is twice as long as it was
    sampled."""

    def render(self, messages: Sequence[Message], images: Sequence[np.ndarray] = (), tools: Any = None) -> np.ndarray:
        spelt = [{**m, "content": " ".join(m["content"]) + " "} if m["role"] == "assistant" else m for m in messages]
        return super().render(spelt, images, tools)


@BOTH
def test_a_prompt_over_the_limit_only_after_re_tokenising_is_not_sent(merge: bool) -> None:
    as_sampled = prompt(("user", "s0"), ("assistant", "abcdef"), ("user", "s1"))
    limits = Limits(len(as_sampled) + 10, 10, 10, 5)
    for chat, turns in ((WatchedChat(), 2), (Spelling(), 1)):
        built, sampler = manager(merge), ScriptedSampler(["abcdef", "x"])
        env = ScriptedEnv("s0", [("s1", 0.5, False, False, {}), ("s2", 0.5, True, False, {})])
        played = run(built, env, sampler, limits, chat)
        assert len(played.turns) == len(sampler.calls) == turns
        assert played.stop_reason == ("length" if turns == 1 else "terminated")
        rows = built.samples(played)
        assert all(len(row.input_ids) <= limits.max_prompt_length + limits.max_new_tokens for row in rows)
        assert build_batch([played], [rows]).tokens["token_level_rewards"].sum() == played.score == 0.5 * turns


@BOTH
def test_a_first_prompt_over_the_limit_gives_no_sample_but_a_trajectory_that_counts(merge: bool) -> None:
    built = manager(merge)
    played = run(built, ScriptedEnv("far too long for it"), ScriptedSampler([]), Limits(12, 4, 4, 5))
    batch = build_batch([played], [built.samples(played)])
    assert (played.stop_reason, len(batch.samples), len(batch.trajectories), len(batch.tokens)) == ("length", 0, 1, 0)


@BOTH
def test_an_appended_end_has_no_loss_and_the_reward_sits_on_the_last_sampled_token(merge: bool) -> None:
    built = manager(merge, history_length=0)
    played = run(
        built, ScriptedEnv("s0", [("s1", 2.0, True, False, {})]), ScriptedSampler(["abcdef"]), Limits(100, 3, 3, 5)
    )
    (sent,) = played.turns
    closed = evolve(
        sent,
        response_ids=np.append(sent.response_ids, END).astype(np.int32),
        response_mask=np.append(sent.response_mask, False),
        logprobs=np.append(sent.logprobs, 0).astype(np.float32),
        versions=np.append(sent.versions, -1).astype(np.int32),
    )
    played = evolve(played, turns=(closed,))
    (row,) = built.samples(played)
    head = prompt(("user", "s0"))
    assert row.input_ids.tolist() == [*head, *text_ids("abc"), END]
    assert row.response_mask[len(head) :].tolist() == [True, True, True, False]
    assert (row.versions[-1], row.turn[-1], row.logprobs[-1]) == (-1, -1, 0)  # type: ignore[index]
    rewards = build_batch([played], [[row]]).tokens["token_level_rewards"]
    assert rewards[-2] == rewards.sum() == 2.0


@BOTH
def test_an_end_that_the_template_adds_between_turns_is_not_sampled(merge: bool) -> None:
    """A response cut by its limit: the next prompt closes it, and the merged row has that end with mask 0."""
    built = manager(merge)
    played = run(built, ScriptedEnv("s0", going("s1", "s2")), ScriptedSampler(["abcdef", "x"]), Limits(100, 3, 3, 2))
    rows = built.samples(played)
    assert len(rows) == (1 if merge else 2)
    at = len(prompt(("user", "s0"))) + 3
    assert rows[-1].input_ids[at] == END
    assert not rows[-1].response_mask[at]


@BOTH
def test_an_empty_generation_is_a_turn_without_a_sample(merge: bool) -> None:
    built = manager(merge)
    env = ScriptedEnv(
        "s0", [("s1", 1.0, False, False, {}), ("s2", 2.0, False, False, {}), ("s3", 4.0, True, False, {})]
    )
    played = run(built, env, ScriptedSampler(["a", "", "b"]))
    rows = built.samples(played)
    batch = build_batch([played], [rows])
    assert (len(played.turns), len(rows)) == (3, 1 if merge else 2)
    rewards = batch.tokens["token_level_rewards"][batch.sampled]
    assert rewards.tolist() == [0.0, 3.0, 0.0, 4.0]  # the empty turn's reward goes to the last token sampled before


@BOTH
@pytest.mark.parametrize("stop", ["terminated", "truncated", "turns", "length"])
def test_every_end_keeps_the_turns_and_rewards_that_there_were(merge: bool, stop: str) -> None:
    built = manager(merge)
    last = ("s2" if stop != "length" else "s" * 999, 1.0, stop == "terminated", stop == "truncated", {})
    env = ScriptedEnv("s0", [*going("s1", reward=1.0), last, ("never", 1.0, False, False, {})])
    played = run(built, env, ScriptedSampler(["a", "b", "c"]), evolve(ROOMY, max_turns=2 if stop == "turns" else 5))
    assert (played.stop_reason, len(played.turns), played.score) == (stop, 2, 2.0)
    rows = built.samples(played)
    assert len(rows) == (1 if merge else 2)
    assert sum(row.response_mask.sum() for row in rows) == 4
    assert build_batch([played], [rows]).tokens["token_level_rewards"].sum() == 2.0


class Counting(FakeChat):
    """Remembers how many characters it was given; a token is `width` of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.given = width, 0

    def _ids(self, text: str) -> np.ndarray:
        self.given += len(text)
        return int32(np.full(len(text) // self.width, 7))

    def render(self, messages: Sequence[Message], images: Sequence[np.ndarray] = (), tools: Any = None) -> np.ndarray:
        return self._ids("".join(message["content"] for message in messages))

    def extend(
        self, ids: np.ndarray, finish: str, messages: Sequence[Message], images: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        return self._ids("".join(message["content"] for message in messages))

    def continue_text(self, ids: np.ndarray, text: str) -> np.ndarray:
        return self._ids(text)


LONG = "x" * 10_000_000


@pytest.mark.parametrize(
    "make", [manager, lambda merge: TrajectoryManager(TrajectoryConfig(), ManagerContext("Tag", 10))]
)
@pytest.mark.parametrize(("first", "turns"), [(LONG, 0), ("short", 1)])
def test_a_text_that_never_has_room_ends_the_episode_before_it_is_encoded(make: Any, first: str, turns: int) -> None:
    chat = Counting(4)
    env = ScriptedEnv(first, going(LONG))
    played = run(make(False), env, ScriptedSampler(["up"]), chat=chat)
    assert (played.stop_reason, len(played.turns)) == ("length", turns)
    assert chat.given < 40 * ROOMY.sequence_length


def test_a_text_of_few_tokens_has_room_however_long_it_is() -> None:
    played = run(
        manager(False),
        ScriptedEnv(LONG, [("end", 1.0, True, False, {})]),
        ScriptedSampler(["up"]),
        chat=Counting(20_000),
    )
    assert (played.stop_reason, len(played.turns)) == ("terminated", 1)
