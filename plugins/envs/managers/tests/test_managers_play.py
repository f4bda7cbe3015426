"""What both managers share: actions, penalties, anchors, what the environment reports, and how an episode ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from managers_fakes import KINDS, ROOMY, ScriptedEnv, ScriptedSampler, WatchedChat, going, image_part, run, text_part

from turnwise.contracts.environment import Response
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError, EnvironmentFailure
from turnwise_managers import env_managers


def test_hooks_name_both_managers_and_their_targets_exist() -> None:
    import importlib

    for record in env_managers():
        target, config = KINDS[record.name]
        for text, expected in ((record.target, target), (record.config, config)):
            module, name = text.split(":")
            assert getattr(importlib.import_module(module), name) is expected
    assert {record.name for record in env_managers()} == set(KINDS)


def test_format_penalty_is_added_where_the_pattern_finds_nothing(make: Any) -> None:
    env = ScriptedEnv("s0", going("s1", "s2", "s3", "s4", reward=1.0))
    sampler = ScriptedSampler(["<a>x</a>", "x", "", "<a></a>"])
    played = run(make(action_pattern="<a>(.*?)</a>", format_penalty=-0.25), env, sampler, evolve(ROOMY, max_turns=4))
    assert env.actions == ["x", "", "", ""]
    assert [turn.action for turn in played.turns] == env.actions
    assert [turn.reward for turn in played.turns] == [1.0, 0.75, 0.75, 0.75]
    assert played.metrics == {"invalid_actions": 0.75}


def test_the_whole_response_reaches_the_environment(make: Any) -> None:
    env = ScriptedEnv("s0", going("s1", "s2"))
    limits = evolve(ROOMY, max_turns=2, max_tokens_per_step=14)
    run(make(action_pattern="<a>(.*?)</a>"), env, ScriptedSampler(["so <a>x</a>", "<a>y</a> and a long tail"]), limits)
    assert env.responses == [Response("so <a>x</a>", "stop", 12), Response("<a>y</a> and a", "length", 14)]
    spoken = ScriptedEnv("s0", going("s1"))
    run(make(), spoken, ScriptedSampler(["x"], takes="messages"), evolve(ROOMY, max_turns=1))
    assert spoken.responses == [Response("x", "stop", None)]


def test_without_a_pattern_nothing_is_invalid(make: Any) -> None:
    played = run(
        make(format_penalty=-1.0), ScriptedEnv("s0", going("s1")), ScriptedSampler([""]), evolve(ROOMY, max_turns=1)
    )
    assert (played.score, played.metrics) == (0.0, {})


def test_anchor_is_the_state_before_the_call(make: Any) -> None:
    board = np.zeros(2)
    steps = [
        ("s1", 0.0, False, False, {"state_key": board}),
        ("s2", 0.0, False, False, {}),
        ("s3", 0.0, False, False, {"state_key": 9}),
    ]

    class Writing(ScriptedEnv):
        async def step(self, action: str, response: Any = None) -> Any:
            answer = await super().step(action)
            board[:] = len(self.actions)
            return answer

    played = run(
        make(),
        Writing("s0", [*steps, ("s4", 0.0, True, False, {})], {"state_key": ("at", 0)}),
        ScriptedSampler(list("abcd")),
    )
    first, second, third, fourth = (turn.anchor for turn in played.turns)
    assert (first, third, fourth) == (("at", 0), "s2", 9)
    np.testing.assert_array_equal(second, [1.0, 1.0])  # as it was reported, not as the environment went on writing
    assert [turn.observation for turn in played.turns] == ["s0", "s1", "s2", "s3"]


@pytest.mark.parametrize(
    ("terminated", "truncated", "limit", "expected"),
    [(True, False, 1, "terminated"), (False, True, 1, "truncated"), (False, False, 1, "turns")],
)
def test_stop_reason(make: Any, terminated: bool, truncated: bool, limit: int, expected: str) -> None:
    env = ScriptedEnv("s0", [("s1", 0.0, terminated, truncated, {})])
    assert run(make(), env, ScriptedSampler(["x"]), evolve(ROOMY, max_turns=limit)).stop_reason == expected


def test_success_metrics_and_actions_are_what_was_reported_last(make: Any) -> None:
    steps = [
        ("s1", 0.0, False, False, {"metrics": {"a": 2, "b": True}, "success": True, "actions": ["l", "r"]}),
        ("s2", 0.0, False, False, {"metrics": {"a": 3.5}}),
        ("s3", 0.0, False, False, {"success": np.bool_(False)}),
    ]
    sampler = ScriptedSampler(["x", "y", "z"])
    played = run(
        make(), ScriptedEnv("s0", steps, {"actions": ("u",), "metrics": {"c": 1}}), sampler, evolve(ROOMY, max_turns=3)
    )
    assert played.success is False
    assert played.metrics == {"a": 3.5, "b": 1.0, "c": 1.0}
    assert [turn.metrics for turn in played.turns] == [{"a": 2.0, "b": 1.0}, {"a": 3.5}, {}]
    assert [call["actions"] for call in sampler.calls] == [("u",), ("l", "r"), ("l", "r")]


def test_success_is_unknown_unless_reported(make: Any) -> None:
    assert run(make(), ScriptedEnv("s0", [("s1", 1.0, True, False, {})]), ScriptedSampler(["x"])).success is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish": "abort"}, "aborted the request, in turn 0 of Tag, group 7, member 3"),
        ({"ids": None}, "returned none"),
        ({"ids": np.zeros(51, np.int32)}, "returned 51 tokens where 50 were allowed"),
        ({"logprobs": np.zeros(1, np.float32)}, "returned 3 tokens but 1 logprobs"),
        ({"versions": np.zeros(9, np.int32)}, "returned 3 tokens but 9 versions"),
    ],
)
def test_a_generation_that_breaks_its_contract_is_an_engine_error(
    make: Any, change: dict[str, Any], message: str
) -> None:
    sampler = ScriptedSampler(["go"], change=lambda generation: evolve(generation, **change))
    with pytest.raises(EngineError, match=message):
        run(make(), ScriptedEnv("s0", going("s1")), sampler)


def test_environment_failures_pass_through(make: Any) -> None:
    class Failing(ScriptedEnv):
        async def step(self, action: str, response: Any = None) -> Any:
            raise EnvironmentFailure("it hung")

    with pytest.raises(EnvironmentFailure, match="it hung"):
        run(make(), Failing("s0"), ScriptedSampler(["x"]))


@pytest.mark.parametrize(
    ("observation", "info", "message"),
    [
        ([{"type": "image", "image": np.zeros((2, 2, 3))}], {}, r"an image that is float64 \(2, 2, 3\)"),
        ([{"type": "image"}], {}, "an image that is NoneType"),
        ([{"type": "text"}], {}, "the text part"),
        ([{"role": "user", "content": 3}], {}, "the message"),
        ("s", {"metrics": {"a": "high"}}, "the metrics"),
        ("s", {"metrics": [1]}, "the metrics"),
        ("s", {"actions": "up"}, "the actions 'up'"),
    ],
)
def test_what_an_environment_must_not_report_is_an_environment_failure(
    make: Any, observation: Any, info: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvironmentFailure, match=f"Tag .*{message}.*Fix:"):
        run(make(), ScriptedEnv(observation, info=info), ScriptedSampler([]))


def with_extras(value: Any) -> Any:
    return lambda generation: Generation(
        generation.text, generation.ids, None, None, "stop", {"expert_indices": value, "other": 1}
    )


def test_expert_indices_are_carried_per_sampled_token(make: Any) -> None:
    env = ScriptedEnv("s0", [("s1", 0.0, True, False, {})])
    indices = np.arange(3 * 2 * 2).reshape(3, 2, 2)
    played = run(make(), env, ScriptedSampler(["go"], change=with_extras(indices)))
    np.testing.assert_array_equal(played.turns[0].extras["expert_indices"], indices)
    assert played.turns[0].extras["other"] == 1
    assert played.turns[0].versions.tolist() == [-1, -1, -1]


def test_empty_expert_indices_are_none_at_all_and_another_length_is_an_error(make: Any) -> None:
    steps: list[Any] = [("s1", 0.0, True, False, {})]
    played = run(make(), ScriptedEnv("s0", steps), ScriptedSampler(["go"], change=with_extras([])))
    assert played.turns[0].extras == {"other": 1}
    with pytest.raises(ValueError, match="2 entries for 3 sampled tokens"):
        run(make(), ScriptedEnv("s0", steps), ScriptedSampler(["go"], change=with_extras(np.zeros((2, 1, 1)))))


def test_templates_dress_text_parts_and_the_last_message(make: Any) -> None:
    observations = [
        [text_part("look: "), image_part(1)],
        [{"role": "tool", "content": "result"}, {"role": "user", "content": "go on"}],
        "plain",
    ]
    options = {
        "agent_template": "T{turn_idx} {observation} left {actions_left}",
        "pre_step_template": "<",
        "next_step_template": ">",
    }
    sampler = ScriptedSampler(["a", "b", "c"], takes="messages")
    played = run(
        make(**options),
        ScriptedEnv(observations[0], going(*observations[1:], "end")),
        sampler,
        evolve(ROOMY, max_turns=3),
    )
    conversation = [m for m in sampler.calls[2]["messages"] if m["role"] != "assistant"]
    assert conversation == [
        {
            "role": "user",
            "content": [text_part("T1 <look: "), {"type": "image", "image": played.images[0]}, text_part("> left 3")],
        },
        {"role": "tool", "content": "result"},
        {"role": "user", "content": "T2 <go on> left 2"},
        {"role": "user", "content": "T3 <plain> left 1"},
    ]


def test_observations_pass_unchanged_without_templates(make: Any) -> None:
    messages = [
        {"role": "tool", "content": "result", "name": "f"},
        {"role": "user", "content": [text_part("a"), text_part("b")]},
    ]
    sampler = ScriptedSampler(["a", "b"], takes="messages")
    run(make(), ScriptedEnv("", going(messages, "end")), sampler, evolve(ROOMY, max_turns=2))
    assert sampler.calls[0]["messages"] == [{"role": "user", "content": ""}]
    assert sampler.calls[1]["messages"][2:] == messages


def test_the_system_template_is_not_filled_in(make: Any) -> None:
    sampler = ScriptedSampler(["a"], takes="messages")
    system = r"Write \boxed{answer} or {turn_idx} or {{x}}."
    run(make(agent_system_template=system), ScriptedEnv("s0", going("s1")), sampler, evolve(ROOMY, max_turns=1))
    assert sampler.calls[0]["messages"][0] == {"role": "system", "content": system}


def test_template_args_reach_the_chat(make: Any) -> None:
    chat = WatchedChat()
    run(
        make(template_args={"enable_thinking": False}),
        ScriptedEnv("s0", going("s1")),
        ScriptedSampler(["a"]),
        evolve(ROOMY, max_turns=1),
        chat,
    )
    assert chat.args == {"enable_thinking": False}


@pytest.mark.parametrize(("limit", "expected"), [(50, 20), (7, 7)])
def test_a_template_may_say_how_long_a_response_can_be(make: Any, limit: int, expected: int) -> None:
    sampler = ScriptedSampler(["a"], takes="messages")
    limits = evolve(ROOMY, max_turns=1, max_new_tokens=20, max_tokens_per_step=limit)
    run(
        make(agent_template="{observation}, at most {max_response_length} tokens"),
        ScriptedEnv("s0", going("s1")),
        sampler,
        limits,
    )
    assert sampler.calls[0]["messages"][-1]["content"] == f"s0, at most {expected} tokens"
