"""The trajectory manager: tokens in, tokens out, one row an episode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from managers_fakes import (
    ROOMY,
    ScriptedEnv,
    ScriptedSampler,
    WatchedChat,
    going,
    image,
    image_part,
    prompt,
    run,
    text_ids,
    text_part,
)

from turnwise.contracts.env_manager import Limits, ManagerContext
from turnwise.data.batch import build_batch
from turnwise.errors import ConfigError
from turnwise.testing.fake_model import END, IMAGE, IMAGE_TOKENS, ROLES
from turnwise_managers.config import TrajectoryConfig
from turnwise_managers.trajectory import TrajectoryManager


def manager(**options: object) -> TrajectoryManager:
    return TrajectoryManager(TrajectoryConfig(**options), ManagerContext("Tag", 10))  # type: ignore[arg-type]


def three_turns() -> tuple[ScriptedEnv, ScriptedSampler]:
    env = ScriptedEnv("s0", [*going("s1", "s2"), ("s3", 1.0, True, False, {"success": True})])
    return env, ScriptedSampler(["up", "left", "down"])


def test_prompt_is_previous_prompt_sampled_tokens_and_the_continuation() -> None:
    env, sampler = three_turns()
    played = run(manager(agent_system_template="sys"), env, sampler)
    first = prompt(("system", "sys"), ("user", "s0"))
    second = [*first, *text_ids("up"), END, *prompt(("user", "s1"))]
    third = [*second, *text_ids("left"), END, *prompt(("user", "s2"))]
    assert [call["ids"].tolist() for call in sampler.calls] == [first, second, third]
    assert [turn.prompt_ids.tolist() for turn in played.turns] == [first, second, third]
    assert env.actions == ["up", "left", "down"]
    assert (played.stop_reason, played.success, played.score, played.final_observation) == (
        "terminated",
        True,
        1.0,
        "s3",
    )
    assert (played.tag, played.group, played.member, played.attempt, played.seed) == ("Tag", 7, 3, 1, 11)


def test_sample_masks_only_sampled_tokens_and_aligns_logprobs_versions_and_turns() -> None:
    built = manager()
    (sample,) = built.samples(run(built, *three_turns()))
    head = prompt(("user", "s0"))
    expected: list[tuple[int, bool, int, float, int]] = [(i, False, -1, 0.0, -1) for i in head]
    for turn, (text, then) in enumerate([("up", "s1"), ("left", "s2"), ("down", None)]):
        expected += [(i, True, turn, -turn - k / 100, 10 * turn + k) for k, i in enumerate([*text_ids(text), END])]
        expected += [] if then is None else [(i, False, -1, 0.0, -1) for i in prompt(("user", then))]
    assert sample.input_ids.tolist() == [row[0] for row in expected]
    assert sample.response_mask.tolist() == [row[1] for row in expected]
    assert sample.turn.tolist() == [row[2] for row in expected]
    np.testing.assert_array_equal(sample.logprobs, np.array([row[3] for row in expected], np.float32))
    assert sample.versions.tolist() == [row[4] for row in expected]
    assert (sample.input_ids.dtype, sample.turn.dtype, sample.versions.dtype) == (np.int32, np.int32, np.int32)


def test_an_end_that_was_not_sampled_is_added_without_loss_and_the_reward_sits_on_the_last_sampled_token() -> None:
    built = manager()
    sampler = ScriptedSampler(["upper", "x"])
    env = ScriptedEnv("s0", [("s1", 0.5, False, False, {}), ("s2", 2.0, True, False, {})])
    played = run(built, env, sampler, Limits(1000, 3, 50, 10))
    assert played.turns[0].finish == "length"
    head = len(prompt(("user", "s0")))
    (sample,) = built.samples(played)
    assert sample.input_ids[head : head + 4].tolist() == [*text_ids("upp"), END]
    assert sample.response_mask[head : head + 4].tolist() == [True, True, True, False]
    rewards = build_batch([played], [[sample]]).tokens["token_level_rewards"]
    assert rewards[head + 2] == 0.5
    assert rewards[-1] == 2.0
    assert rewards.sum() == 2.5


def test_a_call_may_generate_the_smallest_of_the_three_limits() -> None:
    head = len(prompt(("user", "s0")))

    def allowed(limits: Limits) -> int:
        sampler = ScriptedSampler([""])
        run(manager(), ScriptedEnv("s0", [("", 0.0, True, False, {})]), sampler, limits)
        return int(sampler.calls[0]["max_new_tokens"])

    assert allowed(Limits(100, 7, 9, 5)) == 7
    assert allowed(Limits(100, 9, 6, 5)) == 6
    assert allowed(Limits(head + 4, 9, 6, 5)) == 4


def test_prompt_over_limit_ends_the_trajectory_and_keeps_its_turns() -> None:
    env = ScriptedEnv("s0", going("an observation that is far too long to fit", "never"))
    sampler = ScriptedSampler(["up", "never"])
    built = manager()
    played = run(built, env, sampler, Limits(20, 10, 10, 10))
    assert (played.stop_reason, len(played.turns), len(sampler.calls)) == ("length", 1, 1)
    assert played.final_observation.startswith("an observation")
    (sample,) = built.samples(played)
    assert sample.input_ids.tolist() == [*prompt(("user", "s0")), *text_ids("up"), END]


@pytest.mark.parametrize(("spare", "turns"), [(0, 1), (1, 2)])
def test_a_turn_needs_room_for_one_token(spare: int, turns: int) -> None:
    second = len(prompt(("user", "s0"))) + len("up") + 1 + len(prompt(("user", "s1")))
    played = run(
        manager(),
        ScriptedEnv("s0", going("s1", "s2")),
        ScriptedSampler(["up", "down"]),
        Limits(second + spare, 10, 10, 10),
    )
    assert (len(played.turns), played.stop_reason) == (turns, "length")
    if turns == 2:
        assert played.turns[1].text == "d"


def test_first_prompt_without_room_gives_no_turn_and_no_sample() -> None:
    built = manager()
    sampler = ScriptedSampler([])
    played = run(built, ScriptedEnv("much too long"), sampler, Limits(10, 5, 5, 3))
    assert (played.turns, played.stop_reason, played.score, played.metrics, sampler.calls) == (
        (),
        "length",
        0.0,
        {},
        [],
    )
    assert built.samples(played) == []


def test_empty_generation_is_a_turn_whose_reward_moves_to_a_sampled_token() -> None:
    built = manager()
    env = ScriptedEnv(
        "s0", [("s1", 1.0, False, False, {}), ("s2", 2.0, False, False, {}), ("s3", 4.0, True, False, {})]
    )
    played = run(built, env, ScriptedSampler(["", "go", ""]))
    assert [len(turn.response_ids) for turn in played.turns] == [0, 3, 0]
    (sample,) = built.samples(played)
    assert sorted(set(sample.turn.tolist())) == [-1, 1]
    rewards = build_batch([played], [[sample]]).tokens["token_level_rewards"]
    assert rewards[np.flatnonzero(sample.response_mask)].tolist() == [1.0, 0.0, 6.0]
    assert built.samples(run(built, ScriptedEnv("s0", [("s1", 1.0, True, False, {})]), ScriptedSampler([""]))) == []


def test_missing_logprobs_of_one_turn_leave_the_sample_without() -> None:
    built = manager()
    env, _ = three_turns()
    seen = iter(range(3))
    sampler = ScriptedSampler(
        ["up", "left", "down"], change=lambda g: evolve(g, logprobs=None) if next(seen) == 1 else g
    )
    played = run(built, env, sampler)
    assert played.turns[1].logprobs is None
    assert built.samples(played)[0].logprobs is None


def test_single_turn_history_keeps_the_dialogue_inside_one_assistant_message() -> None:
    built = manager(history="single_turn", pre_step_template="[", next_step_template="]")
    env, sampler = three_turns()
    played = run(built, env, sampler)
    head = prompt(("user", "[s0]"))
    expected = [
        *head,
        *text_ids("up"),
        END,
        *text_ids("[s1]"),
        *text_ids("left"),
        END,
        *text_ids("[s2]"),
        *text_ids("down"),
        END,
    ]
    (sample,) = built.samples(played)
    assert sample.input_ids.tolist() == expected
    assert expected.count(ROLES["assistant"]) == 1
    assert sample.response_mask.sum() == len("upleftdown") + 3


def test_single_turn_history_as_messages_is_one_assistant_message_to_go_on_with() -> None:
    sampler = ScriptedSampler(["up ", "left "], takes="messages")
    run(
        manager(history="single_turn", agent_system_template="sys"),
        ScriptedEnv("s0", going("s1 ", "s2")),
        sampler,
        evolve(ROOMY, max_turns=2),
    )
    head = [{"role": "system", "content": "sys"}, {"role": "user", "content": "s0"}]
    assert [call["messages"] for call in sampler.calls] == [head, [*head, {"role": "assistant", "content": "up s1 "}]]


def test_single_turn_history_cannot_show_later_images() -> None:
    env = ScriptedEnv([image_part(1)], going([image_part(2)]))
    with pytest.raises(ConfigError, match="Fix: history: messages"):
        run(manager(history="single_turn"), env, ScriptedSampler(["up", "down"]))


def test_messages_backend_gets_the_growing_conversation_and_gives_no_samples() -> None:
    built = manager(agent_system_template="sys")
    env, _ = three_turns()
    sampler = ScriptedSampler(["up", "left", "down"], takes="messages")
    played = run(built, env, sampler, Limits(1, 4, 3, 10))
    texts = [
        ("system", "sys"),
        ("user", "s0"),
        ("assistant", "up"),
        ("user", "s1"),
        ("assistant", "left"),
        ("user", "s2"),
    ]
    conversation = [{"role": role, "content": text} for role, text in texts]
    assert [call["messages"] for call in sampler.calls] == [conversation[:2], conversation[:4], conversation]
    assert {call["max_new_tokens"] for call in sampler.calls} == {3}
    assert [turn.response_ids.dtype for turn in played.turns] == [np.int32] * 3
    assert (played.stop_reason, played.success, built.samples(played)) == ("terminated", True, [])
    assert len(build_batch([played], [[]]).turns) == 3


def test_images_are_kept_once_and_prompts_refer_to_them_in_order() -> None:
    buffer = image(5)
    shown = [{"type": "image", "image": buffer}, text_part(" and "), image_part(6)]
    env = ScriptedEnv(shown, going([image_part(6), image_part(7)], "no image", "end"))
    chat, sampler = WatchedChat(), ScriptedSampler(["a", "b", "c"])
    built = manager(pre_step_template="<", next_step_template=">")

    async def overwrite(action: str, response: Any, step=env.step):  # type: ignore[no-untyped-def]
        buffer[:] = 0
        return await step(action)

    env.step = overwrite  # type: ignore[method-assign]
    played = run(built, env, sampler, Limits(1000, 50, 50, 3), chat)
    assert [picture[0, 0, 0] for picture in played.images] == [5, 6, 7]
    assert [turn.images for turn in played.turns] == [(0, 1), (0, 1, 1, 2), (0, 1, 1, 2)]
    assert [[picture[0, 0, 0] for picture in call["images"]] for call in sampler.calls] == [
        [5, 6],
        [5, 6, 6, 7],
        [5, 6, 6, 7],
    ]
    assert [len(pictures) for pictures in chat.images] == [2, 2, 0]  # each time those of the new messages
    (sample,) = built.samples(played)
    assert sample.images == (0, 1, 1, 2)
    assert played.turns[0].observation[0]["image"] is played.images[0]
    head = [
        ROLES["user"],
        *text_ids("<"),
        *[IMAGE] * IMAGE_TOKENS,
        *text_ids(" and "),
        *[IMAGE] * IMAGE_TOKENS,
        *text_ids(">"),
        END,
        ROLES["assistant"],
    ]
    assert played.turns[0].prompt_ids.tolist() == head


def test_tools_of_the_reset_reach_the_chat_template() -> None:
    chat, tools = WatchedChat(), [{"name": "click"}]
    run(manager(), ScriptedEnv("s0", [("", 0.0, True, False, {})], {"tools": tools}), ScriptedSampler(["x"]), chat=chat)
    assert chat.tools == tools
