"""The public parts: several calls a turn, several lines of one world, another model, rewards that are credited."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from managers_fakes import ROOMY, ScriptedEnv, ScriptedSampler, WatchedChat, episode, going, image_part, prompt

from turnwise.data.trajectory import Trajectory
from turnwise_managers import base
from turnwise_managers.base import (
    Anew,
    Growing,
    Line,
    ManagerConfig,
    Prompts,
    Rules,
    World,
    one_row,
    play,
    row_per_call,
)

RULES = Rules.of(ManagerConfig())


def reflected(
    env: ScriptedEnv,
    sampler: ScriptedSampler,
    rules: Rules = RULES,
    prompts: Prompts = Growing(),  # noqa: B008
    turns: int = 2,
) -> Trajectory:
    async def run() -> Trajectory:
        world = await World(episode(env, evolve(ROOMY, max_turns=turns))).begin()
        line = Line(world, sampler, rules, prompts)
        while world.going:
            line.show()
            await line.ask()
            line.show("sure?")
            await line.ask()
            await line.act()
        return line.trajectory()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("order", "said"),
    [("ss", "show was called twice"), ("a", "ask was called before show"), ("c", "act was called before ask")],
)
def test_a_line_says_what_was_called_out_of_order(order: str, said: str) -> None:
    async def run() -> None:
        env = ScriptedEnv("s0", [("s1", 1.0, True, False, {})])
        line = Line(await World(episode(env)).begin(), ScriptedSampler(["a"]), RULES, Growing())
        for letter in order:
            if letter == "s":
                line.show()
            else:
                await (line.ask() if letter == "a" else line.act())

    with pytest.raises(AssertionError, match=said):
        asyncio.run(run())


def test_every_name_of_the_base_is_there() -> None:
    assert all(hasattr(base, name) for name in base.__all__)


def test_two_calls_to_a_step_are_two_turns_of_which_one_acts() -> None:
    env = ScriptedEnv("s0", [("s1", 1.0, False, False, {"state_key": 7}), ("s2", 2.0, True, False, {})])
    played = reflected(env, ScriptedSampler(["a", "b", "c", "d"]))
    assert env.actions == ["b", "d"]
    assert [turn.reward for turn in played.turns] == [0.0, 1.0, 0.0, 2.0]
    assert [turn.action for turn in played.turns] == ["", "b", "", "d"]
    assert [turn.anchor for turn in played.turns] == [
        "s0",
        ("s0", 1),
        7,
        (7, 1),
    ]  # a draft is not compared with the answer after it
    assert [turn.observation for turn in played.turns[::2]] == ["s0", "s1"]
    assert (played.stop_reason, played.score) == ("terminated", 3.0)


def test_a_growing_conversation_holds_every_call_in_one_row() -> None:
    played = reflected(ScriptedEnv("s0", going("s1")), ScriptedSampler(["a", "b"]), turns=1)
    first, second = played.turns
    assert first.prompt_ids.tolist() == prompt(("user", "s0"))
    assert second.prompt_ids.tolist() == [*prompt(("user", "s0")), *first.response_ids, *prompt(("user", "sure?"))]
    (row,) = one_row(played)
    assert row.turn[row.response_mask].tolist() == [0, 0, 1, 1]
    assert len(row_per_call(played)) == 2


def test_calls_are_numbered_over_the_episode_and_templates_count_steps() -> None:
    sampler = ScriptedSampler(["a", "b", "c", "d"], takes="messages")
    rules = Rules.of(ManagerConfig(agent_template="{turn_idx}/{actions_left}: {observation}"))
    reflected(ScriptedEnv("s0", going("s1", "s2")), sampler, rules)
    assert [call["turn"] for call in sampler.calls] == [0, 1, 2, 3]
    assert [call["messages"][-1]["content"] for call in sampler.calls] == ["1/2: s0", "sure?", "2/1: s1", "sure?"]


def test_only_calls_that_act_can_be_invalid() -> None:
    rules = Rules.of(ManagerConfig(action_pattern="<a>(.*?)</a>", format_penalty=-0.5))
    played = reflected(ScriptedEnv("s0", going("s1", "s2")), ScriptedSampler(["x", "<a>u</a>", "x", "y"]), rules)
    assert [turn.reward for turn in played.turns] == [0.0, 0.0, 0.0, -0.5]
    assert played.metrics["invalid_actions"] == 0.5


def test_a_manager_may_show_messages_and_images_of_its_own() -> None:
    async def run() -> Any:
        world = await World(episode(ScriptedEnv("s0", going("s1")))).begin()
        sampler = ScriptedSampler(["a", "b"], takes="messages")
        line = Line(world, sampler, RULES, Growing())
        line.show([{"role": "tool", "content": "found"}])
        await line.ask()
        line.show([image_part(3)])
        await line.ask()
        return sampler.calls, line.trajectory()

    calls, played = asyncio.run(run())
    assert calls[0]["messages"] == [{"role": "tool", "content": "found"}]
    assert [turn.images for turn in played.turns] == [(), (0,)]
    assert np.array_equal(played.images[0], image_part(3)["image"])


def test_lines_of_one_world_have_a_conversation_and_a_reward_each() -> None:
    async def run() -> list[Trajectory]:
        world = await World(
            episode(ScriptedEnv("s0", going("s1", "s2", "s3", reward=1.0)), evolve(ROOMY, max_turns=3))
        ).begin()
        sampler = ScriptedSampler(["a", "b", "c"])
        lines = [Line(world, sampler, RULES, Growing(), role) for role in ("x", "y")]
        lines[1].credit(-0.5)  # before its first call
        while world.going:
            mover = lines[world.steps % 2]
            mover.show()
            assert await mover.ask()
            await mover.act()
        return [line.trajectory(success=line.score > 1) for line in lines]

    first, second = asyncio.run(run())
    assert (first.role, [turn.text for turn in first.turns], first.score, first.success) == ("x", ["a", "c"], 2.0, True)
    assert (second.role, [turn.text for turn in second.turns], second.score, second.success) == ("y", ["b"], 0.5, False)
    assert first.turns[1].prompt_ids.tolist() == [
        *prompt(("user", "s0")),
        *first.turns[0].response_ids,
        *prompt(("user", "s2")),
    ]
    assert [turn.observation for turn in first.turns] == ["s0", "s2"]


def test_a_call_without_room_ends_the_line_and_is_not_sent() -> None:
    async def run() -> Trajectory:
        world = await World(episode(ScriptedEnv("s0", going("s1")), evolve(ROOMY, sequence_length=12))).begin()
        line = Line(world, ScriptedSampler(["abc"]), RULES, Growing())
        line.show()
        assert await line.ask()
        line.show("a question that is too long")
        assert not await line.ask()
        return line.trajectory()

    played = asyncio.run(run())
    assert (len(played.turns), played.stop_reason) == (1, "length")


@pytest.mark.parametrize("prompts", [Growing(), Anew()])
def test_play_is_the_loop_of_the_shipped_managers(prompts: Prompts) -> None:
    played = asyncio.run(
        play(
            episode(ScriptedEnv("s0", going("s1", "s2")), evolve(ROOMY, max_turns=2)),
            ScriptedSampler(["a", "b"]),
            RULES,
            prompts,
        )
    )
    assert (len(played.turns), played.stop_reason, played.role) == (2, "turns", "")
    assert WatchedChat().decode(played.turns[1].prompt_ids) == "s0as1"
