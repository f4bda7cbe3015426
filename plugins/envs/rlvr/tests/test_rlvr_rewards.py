"""The rewards of `rlvr`: what each accepts, what it does not, and what a model cannot do to it."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turnwise.errors import EnvironmentFailure, MachineError
from turnwise_rlvr.checkers import Checkers, _made
from turnwise_rlvr.rewards.choice import Choice, letter_of
from turnwise_rlvr.rewards.exact import Exact
from turnwise_rlvr.rewards.math import Math
from turnwise_rlvr.rewards.texts import after_thinking, boxed
from turnwise_rlvr.task import Task


def task(*answers: str, choices: tuple[str, ...] = ()) -> Task:
    return Task("?", answers, "", choices, "a.jsonl, line 1")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1}", "1"),
        (r"first \boxed{1}, then \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\fbox {x_{a_{b}}}", "x_{a_{b}}"),
        ("none", None),
    ],
)
def test_the_last_closed_box_is_found(text: str, inside: str | None) -> None:
    assert boxed(text) == inside


@pytest.mark.parametrize(
    ("text", "rest"),
    [("a", "a"), ("<think>a</think> b", "b"), ("a</think>b</think> c ", "c"), ("<think>a", ""), ("b <think>", "")],
)
def test_thinking_is_left_out(text: str, rest: str) -> None:
    assert after_thinking(text) == rest


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("New York", True), (" new  york.", True), ('"NEW YORK"', True), (r"It is \boxed{New York}", True), ("nyc", True),
        ("York", False), ("New York City", False), ("New-York", False), ("", False),
    ],
)  # fmt: skip
def test_exact(answer: str, right: bool) -> None:
    verdict = Exact().judge(task("New York", "NYC"), answer)
    assert (verdict.score, verdict.words) == (1.0, "Right.") if right else (0.0, "That is not the answer.")


CITIES = ("Paris", "Rome", "a", "Oslo")


@pytest.mark.parametrize(
    ("answer", "score", "none"),
    [
        ("B", 1, 0), ("b", 1, 0), ("(B)", 1, 0), ("B.", 1, 0), ("B. Rome", 1, 0), ("(B) Rome", 1, 0), ("rome", 1, 0), (r"so \boxed{B}", 1, 0),
        (r"\boxed{\text{?}} B", 0, 1), ("Let me see.\nB", 1, 0), ("The answer is B", 1, 0), ("Answer: (b).", 1, 0), ("answer is **B**", 1, 0),
        ("The answer is A, no: the answer is B.", 1, 0), ("The answer is B, no: the answer is A.", 0, 0), ("A", 0, 0), ("D) Oslo", 0, 0),
        ("E", 0, 1), ("A good question", 0, 1), ("I do not know", 0, 1), ("The answer is Berlin", 0, 1),
    ],
)  # fmt: skip
def test_choice(answer: str, score: int, none: int) -> None:
    verdict = Choice().judge(task("B", choices=CITIES), answer)
    assert (verdict.score, dict(verdict.metrics)["no_choice"]) == (score, none)


@pytest.mark.parametrize(
    ("answers", "choices", "letter"),
    [
        (("B",), CITIES, "B"), (("(b)",), CITIES, "B"), (("1",), CITIES, "B"), (("Rome",), CITIES, "B"), (("4",), CITIES, None),
        (("Madrid",), CITIES, None), (("E",), CITIES, None), (("E",), (), "E"), (("Rome",), (), None),
    ],
)  # fmt: skip
def test_the_known_choice_is_a_letter_a_number_from_0_or_the_text(
    answers: tuple[str, ...], choices: tuple[str, ...], letter: str | None
) -> None:
    assert letter_of(task(*answers, choices=choices)) == letter


# --- mathematics

verified = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")


@verified
@pytest.mark.parametrize(
    ("known", "answer", "right"),
    [
        ("0.5", r"Half: $\frac{1}{2}$", True), (r"\frac{1}{2}", "The answer is 0.5", True), ("1/2", r"\boxed{\frac12}", True),
        ("x^2+2x+1", r"$(x+1)^2$", True), (r"$\{1, 2\}$", r"\boxed{\{2, 1\}}", True), ("1000", "1,000", True), ("12", "13, no: 12", True),
        (r"\sqrt{8}", r"$2\sqrt{2}$", True), ("7", "007", True), ("-3", "-3", True),
         ("12", "13", False), ("x^2", "$x^3$", False),
        ("12", "I do not know", False), (r"\text{no solution}", r"\text{no solution}", True),
    ],
)  # fmt: skip
def test_math(known: str, answer: str, right: bool) -> None:
    assert Math().judge(task(known), answer).score == right


@verified
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
@example(5, 5)
@example(0, 0)
def test_whole_numbers_are_compared_as_math_verify_would(one: int, other: int) -> None:
    import math_verify

    expected = math_verify.verify(math_verify.parse(f"${one}$"), math_verify.parse(f"${other}$"))
    assert Math().judge(task(str(one)), str(other)).score == float(expected)


@verified
def test_an_answer_that_keeps_algebra_busy_is_wrong_and_the_next_one_is_judged() -> None:
    reward = Math(timeout=0.5)
    verdict = reward.judge(task("5"), "$9^{9^{9^{9}}}$")
    assert verdict.score == 0.0
    assert reward.judge(task("0.5"), r"$\frac{1}{2}$").score == 1.0


@verified
def test_a_checker_ends_itself_over_the_time() -> None:
    """Whatever holds it: here it is stopped from starting, as algebra would by holding Python's lock."""
    checkers = Checkers(1)
    try:
        assert checkers.compare(["2"], "2", 5.0) == "right"
        assert checkers.compare(["2"], "2" + " + 1" * 20_000, 0.001) == "slow"
        assert checkers.compare(["2"], "2", 5.0) == "right"
    finally:
        checkers.close()


@verified
def test_threads_share_the_checkers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that ask first at the same moment, too."""
    made: list[Checkers] = []
    real = Checkers.__init__
    monkeypatch.setattr(Checkers, "__init__", lambda self, n: (made.append(self), real(self, n))[1])
    _made.cache_clear()
    found: list[float] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(Math().judge(task(f"{n}/7"), f"${2 * n}/14$").score))  # type: ignore[misc]
        for n in range(1, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1.0] * 8
    assert len(made) == 1


@verified
def test_a_known_answer_that_is_no_mathematics_fails_the_episode() -> None:
    with pytest.raises(EnvironmentFailure, match=r"the answer '\$' of a.jsonl, line 1 is no mathematics .*Fix: repair"):
        Math().judge(task("$"), "12")


@verified
def test_a_checker_that_does_not_start_fails_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    checkers = Checkers(1)
    for _ in range(2):  # the first failure leaves the place free for another try
        with pytest.raises(EnvironmentFailure, match="did not start"):
            checkers.compare(["2"], "1/2", 5.0)


@verified
def test_a_checker_that_was_killed_is_started_again() -> None:
    checkers = Checkers(1)
    try:
        assert checkers.compare(["2"], "2", 5.0) == "right"
        process: Any = checkers._free.queue[0]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert checkers.compare(["2"], "2", 5.0) == "right"
    finally:
        checkers.close()


def test_mathematics_without_its_package_is_named_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MachineError, match=r"math needs math-verify, not installed, rlvr. Fix: pip install .*turnwise-rlvr\[math\]"
    ):
        Math().ready()
