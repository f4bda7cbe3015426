"""The reward `exact`: the answer is one of the accepted texts."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from turnwise_rlvr.rewards import Verdict
from turnwise_rlvr.rewards.texts import final, normalised
from turnwise_rlvr.task import Task


@frozen
class Exact:
    r"""1 where the answer (the last `\boxed{…}`, else the whole text) equals an accepted one; case, white space, and full
    stops and quotes around it do not count."""

    needs_answer: ClassVar[bool] = True

    def ready(self) -> None:
        """Nothing is needed."""

    def wrong_with(self, task: Task) -> str | None:
        """An answer of marks alone equals nothing."""
        return None if all(normalised(one) for one in task.answers) else f"has an answer of marks alone: {task.answers}"

    def known(self, task: Task) -> str:
        """The first accepted text."""
        return task.answers[0]

    def judge(self, task: Task, answer: str) -> Verdict:
        """1 or 0."""
        right = normalised(final(answer)) in {normalised(one) for one in task.answers}
        return Verdict(float(right), "Right." if right else "That is not the answer.")
