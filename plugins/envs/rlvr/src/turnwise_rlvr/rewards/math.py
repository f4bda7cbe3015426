"""The reward `math`: answers of mathematics compared as expressions, by math-verify."""

from __future__ import annotations

import importlib.util
from typing import ClassVar

from attrs import field, frozen, validators

from turnwise.errors import EnvironmentFailure, MachineError, pip_install
from turnwise_rlvr.checkers import Checkers
from turnwise_rlvr.rewards import Verdict
from turnwise_rlvr.rewards.texts import final
from turnwise_rlvr.task import Task


@frozen
class Math:
    r"""1 where the answer (the last `\boxed{…}`, else the last number or formula that math-verify finds) equals an accepted
    one as an expression. `timeout`: seconds for one comparison, in a process of its own; an answer that takes longer is
    wrong and has `too_long: 1`."""

    needs_answer: ClassVar[bool] = True
    timeout: float = field(default=5.0, validator=validators.gt(0))

    def ready(self) -> None:
        """Raises MachineError: math-verify is missing."""
        if importlib.util.find_spec("math_verify") is None:
            fix = pip_install("turnwise-rlvr[math]")
            raise MachineError(f"rewards: math needs math-verify, not installed, rlvr. Fix: {fix}")

    def wrong_with(self, task: Task) -> str | None:
        """Nothing is looked at before the start: reading an answer takes milliseconds, and data sets are large."""
        return None

    def known(self, task: Task) -> str:
        """The first accepted text."""
        return task.answers[0]

    def judge(self, task: Task, answer: str) -> Verdict:
        """1 or 0. Raises EnvironmentFailure where the known answer is no mathematics."""
        given = final(answer)
        # Whole numbers, and what is the same letter by letter, need no algebra.
        if given in task.answers:
            return Verdict(1.0, "Right.", (("too_long", 0.0),))
        if _whole(given) and all(_whole(one) for one in task.answers):
            outcome = "right" if int(given) in map(int, task.answers) else "wrong"
        else:
            outcome = Checkers.shared().compare(task.answers, answer, self.timeout)
        if outcome == "unreadable":
            raise EnvironmentFailure(
                f"the answer {task.answers[0]!r:.80} of {task.where} is no mathematics that math-verify reads, rlvr. Fix: repair"
                " the row, or rewards: exact."
            )
        right = outcome == "right"
        words = (
            "Right." if right else "That took too long to check." if outcome == "slow" else "That is not the answer."
        )
        return Verdict(float(right), words, (("too_long", float(outcome == "slow")),))


def _whole(text: str) -> bool:
    # Bounded: Python refuses to read numbers of thousands of digits.
    return len(text) < 300 and text.removeprefix("-").isascii() and text.removeprefix("-").isdecimal()
