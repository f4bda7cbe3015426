"""Which text of a response is the action: the group that matched, the first match or the last, thinking left out, no
pattern for ever."""

from __future__ import annotations

import time
from typing import Any

import pytest
from attrs import evolve
from managers_fakes import ROOMY, ScriptedEnv, ScriptedSampler, going, run

from turnwise.contracts.env_manager import ManagerContext
from turnwise.errors import EnvironmentFailure
from turnwise_managers.config import ManagerConfig, TrajectoryConfig
from turnwise_managers.patterns import ActionFinder, without_thinking
from turnwise_managers.trajectory import TrajectoryManager

ANSWER = "<answer>(.*?)</answer>"


def found(text: str, **options: Any) -> str:
    return ActionFinder.of(ManagerConfig(**options)).find(text, "here")


@pytest.mark.parametrize(
    ("pattern", "text", "action"),
    [
        (None, "  go up \n", "go up"),
        (ANSWER, "so <answer> Up\n&& Left </answer> or <answer>Down</answer>", "Up\n&& Left"),
        (ANSWER, "<answer>Up", ""),
        (ANSWER, "<answer> </answer>", ""),
        (r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", "<think>hm</think>\n<answer>Up</answer>", "Up"),
        ("(a)|b", "b", ""),
        ("((a)b)", "ab", "a"),
    ],
)
def test_the_action_is_the_last_group_of_the_first_match(pattern: str | None, text: str, action: str) -> None:
    assert found(text, action_pattern=pattern) == action


@pytest.mark.parametrize(
    ("text", "action"), [("<answer>Up</answer>", "Up"), (r"so \boxed{Down}", "Down"), ("[Left]", "Left"), ("Right", "")]
)
def test_of_alternatives_the_group_that_matched_is_the_action(text: str, action: str) -> None:
    assert found(text, action_pattern=ANSWER + r"|\\boxed\{(.*?)\}|\[(.*?)\]") == action


def test_the_last_match_is_taken_where_it_is_asked_for() -> None:
    text = "<answer>Up</answer>, no: <answer>Down</answer>"
    assert found(text, action_pattern=ANSWER) == "Up"
    assert found(text, action_pattern=ANSWER, match="last") == "Down"
    assert found("nothing", action_pattern=ANSWER, match="last") == ""
    with pytest.raises(ValueError, match="match"):
        ManagerConfig(match="best")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>a</think> b", " b"),
        ("a <think>b</think> c <think>d</think> e", "a  c  e"),
        ("thought in the prompt's own block</think>b", "b"),  # the chat template opened it
        ("a <think>never closed <answer>Up</answer>", "a "),
        ("<thinking>a</thinking>b", "b"),
        ("no thought", "no thought"),
    ],
)
def test_thinking_is_what_stands_in_its_marks(text: str, left: str) -> None:
    assert without_thinking(text) == left


def test_a_draft_in_the_thinking_does_not_beat_the_answer() -> None:
    text = "<think>maybe <answer>Up</answer>?</think><answer>Down</answer>"
    assert found(text, action_pattern=ANSWER) == "Down"
    assert found(text, action_pattern=ANSWER, strip_thinking=False) == "Up"
    assert found("<think>maybe <answer>Up</answer>", action_pattern=ANSWER) == ""


def test_a_pattern_that_reads_thinking_itself_finds_it() -> None:
    pattern, text = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", "<think>hm</think><answer>Up</answer>"
    assert found(text, action_pattern=pattern) == "Up"
    assert found(text, action_pattern=pattern, strip_thinking=True) == ""


def test_a_whole_response_keeps_its_thinking_unless_set() -> None:
    text = "<think>hm</think> Up"
    assert found(text) == text
    assert found(text, strip_thinking=True) == "Up"


def test_a_catastrophic_pattern_fails_the_episode_and_holds_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise_managers.patterns.PATIENCE", 0.05)
    manager = TrajectoryManager(TrajectoryConfig(action_pattern=r"((?:a|aa)+)$"), ManagerContext())
    env = ScriptedEnv("s0", going("s1"))
    began = time.monotonic()
    with pytest.raises(
        EnvironmentFailure, match=r"action_pattern took more than 0\.05 s on a response of 61 characters, in Tag.*Fix:"
    ):
        run(manager, env, ScriptedSampler(["a" * 60 + "!"]), evolve(ROOMY, max_new_tokens=100, max_tokens_per_step=100))
    assert time.monotonic() - began < 10
