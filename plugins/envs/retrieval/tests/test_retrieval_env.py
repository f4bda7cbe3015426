"""The environment `retrieval`: corpus, search, questions, answers, lengths, options."""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.contracts.environment import Environment, check_reset, check_step
from turnwise.errors import ConfigError, EnvironmentFailure
from turnwise_retrieval.corpus import Corpus, make_corpus, text_of
from turnwise_retrieval.retrieval import Retrieval, normalised
from turnwise_retrieval.words import FILLER, RELATIONS, SYLLABLES

SMALL: dict[str, Any] = {"num_documents": 40, "document_tokens": [100, 400]}
SENTENCES = {
    "birthplace": r"{} was born in (\w+)\.",
    "trade": r"{} works as a (\w+)\.",
    "colour": r"The favourite colour of {} is (\w+)\.",
    "instrument": r"{} plays the (\w+)\.",
}
ASKED = {
    "birthplace": "Where was (.*) born?",
    "trade": "What does (.*) work as?",
    "colour": "What is the favourite colour of (.*)?",
    "instrument": "What does (.*) play?",
}


def solve(env: Retrieval, seed: int) -> list[Any]:
    """Play by reading alone: search for the named person, then from teacher to teacher, and answer with the fact of the
    last document."""
    observation, _ = env.reset(seed=seed)
    relation, who = next(
        (key, found[1])
        for key, pattern in ASKED.items()
        if (found := re.fullmatch(f"Question: {pattern[:-1]}" + r"\?", observation))
    )
    teachers, name = who.count("the teacher of "), who.split()[-1]
    answers = [env.step(f"search: {name}")]
    for _ in range(teachers):
        name = re.search(rf"The teacher of {name} is (\w+)\.", answers[-1][0])[1]  # type: ignore[index]
        answers.append(env.step(f"search: {name}"))
    value = re.search(SENTENCES[relation].format(name), answers[-1][0])[1]  # type: ignore[index]
    return [*answers, env.step(f"answer: {value}")]


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_reading_the_documents_answers_every_question(hops: int) -> None:
    env = Retrieval(**SMALL, hops=hops)
    for seed in range(30):
        answers = solve(env, seed)
        assert len(answers) <= hops + 1
        observation, reward, terminated, truncated, info = answers[-1]
        assert (observation, reward, terminated, truncated, info["success"]) == ("Right.", 1.0, True, False, True)
        assert info["metrics"] == {"searches": float(hops), "invalid": 0.0, "found": 1.0}


def test_a_search_for_a_name_finds_the_document_of_that_person_first() -> None:
    """A person's own document holds the name as the title; their pupils' documents hold it as a teacher. Both match;
    the title must win."""
    corpus = make_corpus(0, 200, 100, 200)
    for i, name in enumerate(corpus.names):
        assert corpus.search(name, 1) == [i]
        assert set(corpus.search(name, 200)) == {i} | {
            pupil for pupil, teacher in enumerate(corpus.teachers) if teacher == i
        }


def slow_search(corpus: Corpus, query: str, count: int) -> list[int]:
    """Over the texts that are indexed, word by word."""
    words = set(re.findall(r"[a-z]+", query.lower()))
    held = [
        {name.lower(), corpus.names[teacher].lower(), *(value.lower() for value in facts.values())}
        for name, teacher, facts in zip(corpus.names, corpus.teachers, corpus.facts)
    ]
    weight = {word: math.log(1 + len(held) / n) for word in words if (n := sum(word in h for h in held))}
    titles = [name.lower() for name in corpus.names]
    score = [
        sum(weight[word] * (1 + (word == title)) for word in sorted(words) if word in h)
        for h, title in zip(held, titles)
    ]
    order = sorted(range(len(held)), key=lambda i: (-score[i], i))
    return [i for i in order if score[i] > 0][:count]


@settings(max_examples=100)
@given(st.data())
def test_search_ranks_as_a_slow_reference_does(data: Any) -> None:
    corpus = make_corpus(3, 30, 100, 100)
    words = [*corpus.names[:10], *FILLER[:3], *RELATIONS["trade"].values, *RELATIONS["colour"].values, "?"]
    query = " ".join(data.draw(st.lists(st.sampled_from(words), max_size=6)))
    assert corpus.search(query, 7) == slow_search(corpus, query, 7)


def test_documents_have_their_lengths_and_hold_their_facts_once() -> None:
    corpus = make_corpus(0, 60, 100, 5000)
    for i, name in enumerate(corpus.names):
        text = text_of(corpus, i)
        assert len(re.findall(r"\w+|[^\w\s]", text)) == corpus.lengths[i]
        for key, pattern in SENTENCES.items():
            assert re.findall(pattern.format(name), text) == [corpus.facts[i][key]]
        assert re.findall(rf"The teacher of {name} is (\w+)\.", text) == [corpus.names[corpus.teachers[i]]]
        assert corpus.teachers[i] != i
    assert min(corpus.lengths) < 200
    assert 3000 < max(corpus.lengths) <= 5000
    assert max(len(text_of(make_corpus(0, 5, 5000, 5000), i).split()) for i in range(5)) < 5000


def test_names_values_and_filler_are_different_words() -> None:
    names = {f"{a}{b}{c}" for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES}
    values = [value.lower() for relation in RELATIONS.values() for value in relation.values]
    assert len(set(values)) == len(values)
    assert len(names) == len(SYLLABLES) ** 3 >= 8000
    assert not names & {*values, *FILLER}
    assert not set(values) & set(FILLER)


def test_equal_options_give_equal_corpora_and_another_seed_another() -> None:
    make_corpus.cache_clear()
    first = make_corpus(5, 20, 100, 300)
    texts = [text_of(first, i) for i in range(20)]
    make_corpus.cache_clear()
    second = make_corpus(5, 20, 100, 300)
    assert second is not first
    assert [text_of(second, i) for i in range(20)] == texts
    assert make_corpus(6, 20, 100, 300).names != first.names


def test_the_same_seed_asks_the_same_question_and_others_others() -> None:
    env, other = Retrieval(**SMALL), Retrieval(**SMALL)
    questions = [env.reset(seed=seed)[0] for seed in range(50)]
    assert [other.reset(seed=seed)[0] for seed in range(50)] == questions
    assert len(set(questions)) > 30
    env.reset()
    assert env.text.endswith("?")


@pytest.mark.parametrize(
    ("action", "observation", "reward", "invalid"),
    [
        ("say hello", "Invalid. Write search: WORDS or answer: WORDS.", -0.5, 1.0),
        ("", "Invalid. Write search: WORDS or answer: WORDS.", -0.5, 1.0),
        ("search: zzz", "Nothing found.", -0.25, 0.0),
        ("  SEARCH :zzz\n", "Nothing found.", -0.25, 0.0),
        ("search:", "Nothing found.", -0.25, 0.0),
    ],
)
def test_what_is_no_answer_goes_on(action: str, observation: str, reward: float, invalid: float) -> None:
    env = Retrieval(**SMALL, search_penalty=-0.25, invalid_penalty=-0.5)
    env.reset(seed=0)
    outcome = env.step(action)
    assert outcome[:4] == (observation, reward, False, False)
    assert outcome[4]["metrics"]["invalid"] == invalid


def test_free_text_may_be_a_search() -> None:
    env = Retrieval(**SMALL, free_text="search")
    env.reset(seed=0)
    name = make_corpus(0, 40, 100, 400).names[7]
    assert env.step(f"who is {name}")[0].startswith(f"{name}\n")
    assert env.step("  ")[0].startswith("Invalid.")
    assert env.step("answer: nothing")[2] is True


def test_a_wrong_answer_ends_the_episode_too() -> None:
    env = Retrieval(**SMALL, wrong_penalty=-0.75)
    env.reset(seed=0)
    outcome = env.step("answer: I do not know")
    assert (*outcome[:4], outcome[4]["success"]) == ("Wrong.", -0.75, True, False, False)
    assert env.step("answer: again")[:4] == ("Wrong.", 0.0, True, False)


@pytest.mark.parametrize(("text", "expected"), [(" Baker. ", "baker"), ("the  Baker!\n", "the baker"), ("", "")])
def test_marks_case_and_white_space_of_an_answer_do_not_count(text: str, expected: str) -> None:
    assert normalised(text) == expected


def test_the_answer_is_matched_exactly_apart_from_that() -> None:
    env = Retrieval(**SMALL)
    for wording, right in (("{}", True), (" {}! ", True), ("a {}", False), ("{}s", False)):
        env.reset(seed=1)
        assert env.step(f"answer: {wording.format(env.answer.upper())}")[4]["success"] is right


def test_several_documents_a_search() -> None:
    env = Retrieval(**SMALL, documents_per_search=3)
    env.reset(seed=0)
    outcome = env.step("search: baker")
    corpus = make_corpus(0, 40, 100, 400)
    expected = corpus.search("baker", 3)
    assert outcome[0] == "\n\n".join(text_of(corpus, i) for i in expected)


def test_state_keys_separate_questions_and_what_is_shown() -> None:
    env = Retrieval(**SMALL)
    first = env.reset(seed=0)[1]["state_key"]
    shown = env.step("search: baker")[4]["state_key"]
    again = env.step("search: baker")[4]["state_key"]
    assert first != shown == again
    assert env.reset(seed=1)[1]["state_key"] != first
    assert env.reset(seed=0)[1]["state_key"] == first
    hash(first)


def test_legal_actions_search_for_who_is_known_and_answer_with_values_of_the_relation() -> None:
    env = Retrieval(**SMALL, hops=2)
    observation, info = env.reset(seed=2)
    searches = [a for a in info["actions"] if a.startswith("search: ")]
    assert len(searches) == 1
    assert searches[0].removeprefix("search: ") in observation
    assert f"answer: {env.answer}" in info["actions"]
    after = env.step(searches[0])[4]["actions"]
    assert len([a for a in after if a.startswith("search: ")]) == 2  # the teacher is known now


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_no_question_of_one_split_is_asked_in_another(split: str) -> None:
    mine = Retrieval(**SMALL, split=split)
    others = [Retrieval(**SMALL, split=other) for other in ("train", "val", "test") if other != split]
    asked = {mine.reset(seed=seed)[0] for seed in range(60)}
    assert not asked & {other.reset(seed=seed)[0] for other in others for seed in range(200)}


def test_an_instance_pickles_in_the_middle_of_an_episode() -> None:
    env = Retrieval(**SMALL)
    env.reset(seed=3)
    env.step("search: baker")
    copy = pickle.loads(pickle.dumps(env))
    for action in ("search: amber", "answer: amber"):
        assert copy.step(action) == env.step(action)


def test_it_keeps_the_contract() -> None:
    env = Retrieval(**SMALL)
    assert isinstance(env, Environment)
    observation, info = check_reset(env.reset(seed=0, options={"index": 1}), "retrieval")
    assert observation.startswith("Question: ")
    assert "search: WORDS" in info["env_instruction"]
    check_step(env.step("search: baker"), "retrieval")
    env.close()
    env.close()


def test_a_rendering_is_the_question_and_the_beginning_of_what_is_shown() -> None:
    env = Retrieval(**SMALL)
    observation, _ = env.reset(seed=0)
    assert env.render() == f"{env.text}\n\n{observation}"
    shown = env.step("search: baker")[0]
    assert env.render() == f"{env.text}\n\n{shown[:400]}"


def test_steps_before_reset_are_reported() -> None:
    with pytest.raises(EnvironmentFailure, match="before reset"):
        Retrieval(**SMALL).step("search: a")
    with pytest.raises(EnvironmentFailure, match="before reset"):
        _ = Retrieval(**SMALL).text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_documents": 1}, "num_documents is 1, retrieval. Fix: an integer from 2 to 8000"),
        ({"num_documents": True}, "num_documents is True"),
        (
            {"document_tokens": 5000},
            r"document_tokens is 5000, retrieval. Fix: shortest and longest, at least 100, as \[100, 5000\]",
        ),
        ({"document_tokens": [50, 100]}, "document_tokens"),
        ({"document_tokens": [300, 200]}, "document_tokens"),
        ({"hops": 0}, "hops is 0, retrieval. Fix: an integer from 1 to 5"),
        ({"documents_per_search": 500}, "documents_per_search"),
        ({"free_text": "serch"}, "Did you mean 'search'"),
        ({"split": "dev"}, "split is 'dev', retrieval.*one of all, train, val, test"),
        ({"search_penalty": 0.1}, "search_penalty is 0.1.*at most 0"),
        ({"invalid_penalty": math.nan}, "invalid_penalty"),
        ({"wrong_penalty": "0"}, "wrong_penalty"),
        ({"corpus_seed": -1}, "corpus_seed"),
    ],
)
def test_options_that_cannot_be_used_are_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Retrieval(**options)
