"""The environment `rlvr`: episodes, tries, templates, what `info` says, options."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from turnwise.contracts.environment import Environment, check_reset, check_step
from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.errors import ConfigError, EngineError, EnvironmentFailure
from turnwise_rlvr.known import KnownAnswer
from turnwise_rlvr.rlvr import Rlvr

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "tag": "double"} for n in range(40)]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(tmp_path / "data.jsonl", ROWS)


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def env(data: Any, rewards: Any = "exact", **options: Any) -> Rlvr:
    return Rlvr(data=data, rewards=rewards, **options)


def test_a_right_answer_ends_the_episode_with_reward_one(file: str) -> None:
    one = env(file)
    assert one.num_tasks == 40
    observation, info = one.reset(seed=0, options={"index": 3})
    assert (observation, info["success"]) == ("What is 3 + 3?", False)
    observation, reward, terminated, truncated, info = one.step("6")
    assert (observation, reward, terminated, truncated, info["success"]) == ("Right.", 1.0, True, False, True)
    assert info["metrics"] == {"tries": 1.0, "no_answer": 0.0, "score_exact": 1.0}
    assert one.step("6")[:4] == ("Right.", 0.0, True, False)


def test_a_wrong_answer_ends_it_with_nothing(file: str) -> None:
    one = env(file)
    one.reset(options={"index": 3})
    outcome = one.step("7")
    assert (*outcome[:4], outcome[4]["success"]) == ("That is not the answer.", 0.0, True, False, False)


@pytest.mark.parametrize("nothing", ["", "  ", "<think>6", "6 <think>", "<think>6</think>  "])
def test_no_answer_scores_nothing_and_is_counted(file: str, nothing: str) -> None:
    one = env(file)
    one.reset(options={"index": 3})
    outcome = one.step(nothing)
    assert outcome[:2] == ("There was no answer.", 0.0)
    assert outcome[4]["metrics"] == {"tries": 1.0, "no_answer": 1.0, "score_exact": 0.0}


def test_what_was_thought_is_no_answer(file: str) -> None:
    one = env(file)
    one.reset(options={"index": 3})
    assert one.step("<think>7?</think> 6")[1] == 1.0


def test_a_wrong_try_is_told_and_the_next_one_counts(file: str) -> None:
    one = env(file, tries=3, retry_template="{words} {left} left.")
    first = one.reset(options={"index": 3})[1]
    outcome = one.step("7")
    assert outcome[:4] == ("That is not the answer. 2 left.", 0.0, False, False)
    assert outcome[4]["state_key"] != first["state_key"]
    assert one.step("")[:4] == ("There was no answer. 1 left.", 0.0, False, False)
    outcome = one.step("6")
    assert outcome[:4] == ("Right.", 1.0, True, False)
    assert outcome[4]["metrics"]["tries"] == 3.0


def test_the_last_try_ends_the_episode(file: str) -> None:
    one = env(file, tries=2)
    one.reset(options={"index": 3})
    assert one.step("7")[0] == "That is not the answer. Try again."
    assert one.step("7")[:4] == ("That is not the answer.", 0.0, True, False)


def test_rewards_of_several_tries_add_up_to_the_last_score(file: str) -> None:
    """Two rewards: one is satisfied at first, both at the end."""
    one = env(file, [{"use": "exact", "weight": 2}, {"use": "math", "weight": 0.5}], tries=4)
    one.reset(options={"index": 3})
    rewards = [one.step(answer)[1] for answer in ("7", "12/2", "8", "6")]
    assert rewards == [0.0, 0.5, -0.5, 2.5]


def test_a_reward_is_for_its_tags_alone(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "B", "tag": "quiz"}, {"question": "r", "answer": "1/2", "tag": "sum"}]
    file = written(tmp_path / "two.jsonl", rows)
    one = env(file, [{"use": "choice", "tags": ["quiz"]}, {"use": "rule", "tags": "sum", "weight": 3}])
    one.reset(options={"index": 0})
    outcome = one.step("(B)")
    assert outcome[1] == 1.0
    assert "score_math" not in outcome[4]["metrics"]
    one.reset(options={"index": 1})
    outcome = one.step("so it is 0.5")
    assert outcome[1] == 3.0
    assert outcome[4]["metrics"]["score_math"] == 1.0


def test_the_template_is_around_the_question_and_other_braces_stay(file: str) -> None:
    one = env(file, template="{question}\nPut it in \\boxed{}, as \\boxed{x}.")
    assert one.reset(options={"index": 1})[0] == "What is 1 + 1?\nPut it in \\boxed{}, as \\boxed{x}."


def test_choices_are_listed_with_their_letters(tmp_path: Path) -> None:
    rows = [{"question": "Which?", "answer": 1, "choices": ["red", "blue"]}]
    file = written(tmp_path / "choices.jsonl", rows)
    assert env(file, "choice").reset(options={"index": 0})[0] == "Which?\nA. red\nB. blue"
    one = env(file, "choice", template="{choices}\n{question}")
    observation, info = one.reset(options={"index": 0})
    assert observation == "A. red\nB. blue\nWhich?"
    assert info["actions"] == ["B", "A"]
    assert one.step("blue")[1] == 1.0


@pytest.mark.parametrize("as_text", [False, True])
def test_a_question_may_be_messages(tmp_path: Path, as_text: bool) -> None:
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1 + 1?"}]
    rows = [{"messages": json.dumps(messages) if as_text else messages, "ground_truth": 2}]
    file = written(tmp_path / "messages.jsonl", rows)
    one = env(file, columns={"question": "messages", "answer": "ground_truth"}, template="{question} Say it.")
    observation, _ = one.reset(options={"index": 0})
    assert observation == [messages[0], {"role": "user", "content": "1 + 1? Say it."}]
    assert one.step("2")[1] == 1.0


def test_without_an_index_the_seed_draws_the_question(file: str) -> None:
    one, other = env(file), env(file)
    drawn = [one.reset(seed=seed)[0] for seed in range(30)]
    assert [other.reset(seed=seed)[0] for seed in range(30)] == drawn
    assert len(set(drawn)) > 10


def test_the_known_answer_comes_first_among_the_actions_and_is_right(file: str) -> None:
    one = env(file)
    for index in range(40):
        info = one.reset(options={"index": index})[1]
        assert len(set(info["actions"])) == len(info["actions"]) == 40
        assert one.step(info["actions"][0])[1] == 1.0


def said(actions: tuple[str, ...]) -> str:
    request = Request(0, GeneratingArgs(), 4, messages=({"role": "user", "content": "?"},), actions=actions)
    return asyncio.run(KnownAnswer(None, InferenceContext(None, None)).generate(request)).text


def test_the_scripted_player_gives_it() -> None:
    assert said(("b", "a")) == "b"
    with pytest.raises(EngineError, match=r"gave no legal action, known_answer. Fix: play rlvr"):
        said(())


def test_state_keys_tell_questions_and_tries_apart(file: str) -> None:
    one = env(file, tries=3)
    keys = [
        one.reset(options={"index": 0})[1]["state_key"],
        one.step("x")[4]["state_key"],
        one.step("x")[4]["state_key"],
    ]
    assert len(set(keys)) == 3
    assert one.reset(options={"index": 0})[1]["state_key"] == keys[0]
    assert one.reset(options={"index": 1})[1]["state_key"] != keys[0]


def test_an_instance_pickles_in_the_middle_of_an_episode_without_its_data(file: str) -> None:
    one = env(file, tries=3)
    one.reset(options={"index": 3})
    one.step("7")
    packed = pickle.dumps(one)
    assert b"What is 8 + 8?" not in packed
    copy = pickle.loads(packed)
    assert copy.step("6") == one.step("6")


def test_it_keeps_the_contract(file: str) -> None:
    one = env(file)
    assert isinstance(one, Environment)
    check_reset(one.reset(seed=0), "rlvr")
    assert one.render().startswith("What is ")
    check_step(one.step("0"), "rlvr")
    assert one.render().endswith(("\n\nRight.", "\n\nThat is not the answer."))
    one.close()
    one.close()


def test_steps_before_reset_are_reported(file: str) -> None:
    with pytest.raises(EnvironmentFailure, match="before reset"):
        env(file).step("1")
    with pytest.raises(EnvironmentFailure, match="before reset"):
        env(file).render()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tries": 0}, "tries is 0, rlvr. Fix: an integer from 1 to 1000"),
        ({"tries": True}, "tries is True"),
        ({"split": "dev"}, "split is 'dev', rlvr. Fix: one of all, train, val, test"),
        ({"template": "no place"}, "template is 'no place', rlvr, without {question}"),
        ({"max_bad_rows": -1}, "max_bad_rows is -1"),
        ({"data": []}, "data is empty, rlvr"),
        ({"data": 3}, "data is 3, rlvr. Fix: a path, or a mapping with either `path` or `generate`"),
        ({"data": {"path": "a", "generate": "arithmetic"}}, "either `path` or `generate`"),
        ({"data": "gone.jsonl"}, r"data: there is no gone.jsonl, seen from .*, rlvr. Fix: correct the path"),
        ({"data": ["a.jsonl", "b.jsonl"]}, r"data\[0\]: there is no a.jsonl"),
        ({"data": {"generate": "algebra"}}, "no generator is named 'algebra', rlvr. Known: arithmetic"),
        ({"data": {"generate": "arithmetc"}}, "Did you mean 'arithmetic'"),
        ({"data": {"generate": "arithmetic", "cuont": 3}}, "unknown key 'cuont', rlvr. Did you mean 'count'"),
        ({"data": {"generate": "arithmetic", "count": 10_000}}, "count is 10000, .* hardly more than"),
        ({"data": {"generate": "arithmetic", "terms": 3}}, r"terms is 3, rlvr arithmetic. Fix: least and most"),
        ({"data": {"generate": "arithmetic", "terms": [4, 2]}}, "terms is 2"),
        ({"data": {"generate": "arithmetic", "operations": "*"}}, r"operations: '\*', rlvr arithmetic. Fix: some of"),
        ({"data": {"generate": "arithmetic", "weight": 0}}, "data.weight is 0, rlvr. Fix: a number above 0"),
        ({"data": {"generate": "arithmetic", "tags": []}}, r"data.tags is \[\]"),
        ({"data": {"generate": "arithmetic", "columns": {"problem": "q"}}}, "columns: 'problem'"),
        ({"data": {"generate": "arithmetic", "columns": ["q"]}}, r"data.columns is \['q'\]"),
        ({"rewards": []}, "rewards is empty, rlvr"),
        ({"rewards": "exakt"}, "no reward is named 'exakt', rlvr. Did you mean 'exact'"),
        ({"rewards": {"weight": 1}}, "rewards is {'weight': 1}, rlvr. Fix: a name, or a mapping with `use: NAME`"),
        ({"rewards": [{"use": "exact", "weight": -1}]}, r"rewards\[0\].weight is -1"),
        ({"rewards": {"use": "exact", "case": True}}, "exact has no option 'case', rlvr. It has: none"),
        ({"rewards": {"use": "math", "timeout": 0}}, "math: 'timeout' must be > 0"),
        (
            {"rewards": "code"},
            "'code': running a model's code needs a sandbox, which this version lacks, rlvr. Fix: one of",
        ),
        ({"rewards": "reward_model"}, "'reward_model': a role for reward models is not in this version"),
        ({"rewards": {"use": "exact", "tags": "other"}}, "has the tag '', for which there is no reward"),
    ],
)
def test_options_that_cannot_be_used_are_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rlvr(**{"data": {"generate": "arithmetic", "count": 20}, "rewards": "exact", **options})
