"""The reward `choice`: the letter of one of several choices."""

from __future__ import annotations

import re
from typing import ClassVar

from attrs import frozen

from turnwise_rlvr.rewards import Verdict
from turnwise_rlvr.rewards.texts import boxed, normalised
from turnwise_rlvr.task import Task

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# A letter and nothing else, or a letter with a mark that sets it apart: `B`, `(B)`, `b.`, `B) Paris`, `B: Paris`.
_ALONE = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_MARKED = re.compile(r"(?:\(([A-Z])\)|([A-Z])[.):])\s.*", re.DOTALL)
_SAID = re.compile(r"\b(?:answer|choice|option)\b(?:\s+is)?\s*:?\s*\**\s*\(?([A-Za-z])\)?(?![\w'’])", re.IGNORECASE)


@frozen
class Choice:
    r"""1 where the response chooses the right letter: in the last `\boxed{…}`, as the whole text or its last line, or after
    `answer`, `answer is`, `answer:` (the last of them). The text of a choice counts as its letter. A response in which no
    letter is found has `no_choice: 1`."""

    needs_answer: ClassVar[bool] = True

    def ready(self) -> None:
        """Nothing is needed."""

    def wrong_with(self, task: Task) -> str | None:
        """The answer must be a letter, the number of a choice from 0, or the text of a choice."""
        if letter_of(task) is not None:
            return None
        return f"has the answer {task.answers[0]!r:.60}, which is none of the choices {list(task.choices)!r:.80}"

    def known(self, task: Task) -> str:
        """Its letter."""
        return letter_of(task) or task.answers[0]

    def judge(self, task: Task, answer: str) -> Verdict:
        """1 or 0."""
        letter = found(task, answer)
        if letter is None:
            return Verdict(0.0, "No choice was found. Answer with a letter.", (("no_choice", 1.0),))
        right = letter == letter_of(task)
        return Verdict(float(right), "Right." if right else f"{letter} is not the answer.", (("no_choice", 0.0),))


def letters(task: Task) -> str:
    """The letters of a task's choices; all of them where its text alone has them."""
    return LETTERS[: len(task.choices)] if task.choices else LETTERS


def letter_of(task: Task) -> str | None:
    """The letter of the known answer."""
    answer = task.answers[0]
    match = _ALONE.fullmatch(answer)
    if match and match[1].upper() in letters(task):
        return match[1].upper()
    if answer.isdecimal() and int(answer) < len(task.choices):
        return LETTERS[int(answer)]
    return _of_text(task, answer)


def found(task: Task, text: str) -> str | None:
    """The letter that a response chooses; None where it chooses none."""
    inside = boxed(text)
    text = text.strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    places = [inside] if inside is not None else [text, *([lines[-1]] if lines else [])]
    for place in places:
        match = _ALONE.fullmatch(place) or _MARKED.fullmatch(place)
        letter = next((group for group in match.groups() if group), "").upper() if match else _of_text(task, place)
        if letter and letter in letters(task):
            return letter
    said = [match[1].upper() for match in _SAID.finditer(text)] if inside is None else []
    return next((letter for letter in reversed(said) if letter in letters(task)), None)


def _of_text(task: Task, text: str) -> str | None:
    wanted = normalised(text)
    return next((LETTERS[i] for i, one in enumerate(task.choices) if normalised(one) == wanted), None)
