"""The stepwise manager: every turn rendered anew, tokenised, then checked; one row a turn."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from managers_fakes import ROOMY, ScriptedEnv, ScriptedSampler, going, image_part, prompt, run, text_ids

from turnwise.contracts.env_manager import Limits, ManagerContext
from turnwise.data.batch import build_batch
from turnwise.testing.fake_model import END
from turnwise_managers.config import StepwiseConfig, TrajectoryConfig
from turnwise_managers.stepwise import StepwiseManager


def manager(**options: Any) -> StepwiseManager:
    return StepwiseManager(StepwiseConfig(**options), ManagerContext("Tag", 10))


def prompts_with(history_length: int | None) -> list[list[int]]:
    sampler = ScriptedSampler(["a", "b", "c"])
    run(
        manager(history_length=history_length, agent_system_template="sys"),
        ScriptedEnv("s0", going("s1", "s2", "s3")),
        sampler,
        evolve(ROOMY, max_turns=3),
    )
    return [call["ids"].tolist() for call in sampler.calls]


@pytest.mark.parametrize("history_length", [None, 0, 1, 2, 5])
def test_prompt_shows_the_last_history_length_turns(history_length: int | None) -> None:
    turns = [("user", "s0"), ("assistant", "a"), ("user", "s1"), ("assistant", "b"), ("user", "s2")]
    length = 9 if history_length is None else history_length
    expected = [prompt(("system", "sys"), *turns[: 2 * t + 1][-(2 * length + 1) :]) for t in range(3)]
    assert prompts_with(history_length) == expected


def test_a_sample_is_one_turn_and_its_response_holds_only_generated_tokens() -> None:
    built = manager(history_length=0)
    played = run(built, ScriptedEnv("s0", [*going("s1"), ("s2", 1.0, True, False, {})]), ScriptedSampler(["ab", "c"]))
    first, second = built.samples(played)
    head = prompt(("user", "s0"))
    assert first.input_ids.tolist() == [*head, *text_ids("ab"), END]
    assert first.response_mask.tolist() == [False] * len(head) + [True] * 3
    assert first.turn.tolist() == [-1] * len(head) + [0] * 3
    assert second.turn[-2:].tolist() == [1, 1]
    assert second.versions[-2:].tolist() == [10, 11]
    assert second.logprobs is not None
    assert second.logprobs[-2:].tolist() == pytest.approx([-1.0, -1.01])
    assert (first.prompt_length, first.response_length) == (len(head), 3)


@pytest.mark.parametrize(("spare", "turns", "stop"), [(0, 2, "turns"), (-1, 1, "length")])
def test_prompt_over_max_prompt_length_is_not_sent_and_the_turns_are_kept(spare: int, turns: int, stop: str) -> None:
    longest = len(prompt(("user", "longer observation")))
    limits = Limits(longest + 6 + spare, 6, 50, 2)
    assert limits.max_prompt_length == longest + spare
    built, sampler = manager(history_length=0), ScriptedSampler(["a", "b"])
    played = run(
        built,
        ScriptedEnv("s0", [("longer observation", 0.5, False, False, {}), ("s2", 0.0, False, False, {})]),
        sampler,
        limits,
    )
    assert (len(played.turns), len(sampler.calls), played.stop_reason, played.score) == (turns, turns, stop, 0.5)
    assert len(built.samples(played)) == turns
    assert played.final_observation == ("s2" if turns == 2 else "longer observation")


def test_first_prompt_over_the_limit_is_a_trajectory_of_no_samples_that_still_counts() -> None:
    built, sampler = manager(), ScriptedSampler(["x"])
    env = ScriptedEnv("far too long", info={"metrics": {"difficulty": 2}, "success": False})
    played = run(built, env, sampler, Limits(12, 4, 4, 5))
    assert (played.turns, played.stop_reason, sampler.calls, built.samples(played)) == ((), "length", [], [])
    assert (played.metrics, played.success) == ({"difficulty": 2.0}, False)
    batch = build_batch([played], [[]])
    assert (len(batch.trajectories), batch.trajectories["scores"].tolist(), len(batch.samples)) == (1, [0.0], 0)


def test_a_call_may_generate_the_smaller_of_its_limits() -> None:
    sampler = ScriptedSampler(["abcdefgh"])
    run(manager(), ScriptedEnv("s0", [("", 0.0, True, False, {})]), sampler, Limits(100, 8, 5, 3))
    assert sampler.calls[0]["max_new_tokens"] == 5


def test_turns_without_sampled_tokens_give_no_sample_but_keep_their_reward() -> None:
    built = manager(history_length=0)
    env = ScriptedEnv(
        "s0", [("s1", 1.0, False, False, {}), ("s2", 2.0, False, False, {}), ("s3", 4.0, True, False, {})]
    )
    played = run(built, env, ScriptedSampler(["", "go", ""]))
    rows = built.samples(played)
    assert (len(played.turns), len(rows), played.score) == (3, 1, 7.0)
    batch = build_batch([played], [rows])
    assert batch.tokens["token_level_rewards"].sum() == 7.0
    assert batch.tokens["turn"][batch.sampled].tolist() == [1, 1, 1]


def test_history_in_the_template_takes_the_place_of_history_messages() -> None:
    template = "{env_instruction}|{step_count}|{current_step}|{history_length}|[{history}]|{current_observation}"
    sampler = ScriptedSampler(["<answer>Up</answer>", "nothing", "<answer>x</answer>"])
    built = manager(agent_template=template, history_length=1, action_pattern="<answer>(.*?)</answer>")
    env = ScriptedEnv("s0", going("s1", "s2", "s3"), {"env_instruction": "Walk."})
    run(built, env, sampler, evolve(ROOMY, max_turns=3))
    texts = [
        "Walk.|0|1|0|[]|s0",
        "Walk.|1|2|1|[(step:1, observation: s0, action: Up)]|s1",
        "Walk.|2|3|1|[(step:2, observation: s1, action: nothing)]|s2",
    ]
    assert [call["ids"].tolist() for call in sampler.calls] == [prompt(("user", text)) for text in texts]


def test_only_the_images_of_shown_turns_are_in_the_prompt() -> None:
    env = ScriptedEnv([image_part(1)], going([image_part(2)], [image_part(1)], "s3"))
    sampler = ScriptedSampler(["a", "b", "c"])
    built = manager(history_length=1)
    played = run(built, env, sampler, evolve(ROOMY, max_turns=3))
    assert len(played.images) == 2
    assert [turn.images for turn in played.turns] == [(0,), (0, 1), (1, 0)]
    assert [[int(picture[0, 0, 0]) for picture in call["images"]] for call in sampler.calls] == [[1], [1, 2], [2, 1]]
    assert [row.images for row in built.samples(played)] == [(0,), (0, 1), (1, 0)]


def test_messages_backend_is_given_messages_and_no_length_check() -> None:
    sampler = ScriptedSampler(["a", "b"], takes="messages")
    built = manager(history_length=0)
    played = run(built, ScriptedEnv("s0", going("s1", "s2")), sampler, Limits(2, 1, 1, 2))
    assert [call["messages"] for call in sampler.calls] == [
        [{"role": "user", "content": text}] for text in ("s0", "s1")
    ]
    assert (played.stop_reason, len(played.turns), built.samples(played)) == ("turns", 2, [])


def test_a_system_message_of_the_environment_stays_when_its_turn_is_forgotten() -> None:
    first = [{"role": "system", "content": "rules"}, {"role": "user", "content": "s0"}]
    sampler = ScriptedSampler(["a", "b"], takes="messages")
    run(manager(history_length=0), ScriptedEnv(first, going("s1", "s2")), sampler, evolve(ROOMY, max_turns=2))
    assert [call["messages"] for call in sampler.calls] == [first, [first[0], {"role": "user", "content": "s1"}]]


def test_the_plan_knows_that_a_turn_is_a_row() -> None:
    assert StepwiseConfig().capabilities.row_per_turn
    assert not TrajectoryConfig().capabilities.row_per_turn
