"""The rewards of `rlvr`, each in a file of its own: what they are given, what they answer, and their names."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
from attrs import field, frozen

from turnwise.errors import ConfigError, did_you_mean, listed
from turnwise_rlvr.options import RewardChoice
from turnwise_rlvr.task import Task

REWARDS = {
    "math": "turnwise_rlvr.rewards.math:Math",
    "exact": "turnwise_rlvr.rewards.exact:Exact",
    "choice": "turnwise_rlvr.rewards.choice:Choice",
    "judge": "turnwise_rlvr.rewards.judge:Judge",
}
"""Name → class, imported when it is used."""
ALIASES = {"rule": "math"}
ABSENT = {
    "code": "running a model's code needs a sandbox, which this version lacks",
    "reward_model": "a role for reward models is not in this version",
}


@frozen
class Verdict:
    """`score` from 0 to 1; `words`: what a model is told that may try again; `metrics`: numbers for the log; `right`: whether
    it will do (unless said otherwise, at 1)."""

    score: float
    words: str = ""
    metrics: tuple[tuple[str, float], ...] = ()
    right: bool = field()

    @right.default
    def _all(self) -> bool:
        return self.score >= 1


class Reward(Protocol):
    """A frozen attrs class whose fields are its options. Raises ConfigError or MachineError from `ready`."""

    needs_answer: bool
    """Whether a row must hold an answer."""

    def ready(self) -> None:
        """Look, before the start, for what is missing."""
        ...

    def wrong_with(self, task: Task) -> str | None:
        """Why this task cannot be judged, before the start; None where it can."""
        ...

    def known(self, task: Task) -> str:
        """A right answer, as the scripted player gives it; asked only where the task has one."""
        ...

    def judge(self, task: Task, answer: str) -> Verdict:
        """Judge an answer, which is not empty and holds no thinking. Raises EnvironmentFailure where it cannot."""
        ...


@frozen
class Applied:
    """A reward as a YAML names it."""

    name: str
    weight: float
    tags: tuple[str, ...]
    reward: Reward

    def applies(self, task: Task) -> bool:
        """Whether it is for the tag of this task."""
        return not self.tags or task.tag in self.tags


def applied(choices: Sequence[RewardChoice]) -> tuple[Applied, ...]:
    """The rewards, ready. Raises ConfigError (unknown name or option) and MachineError (a package is missing)."""
    made = tuple(Applied(*_made(choice)) for choice in choices)
    for one in made:
        one.reward.ready()
    return made


def _made(choice: RewardChoice) -> tuple[str, float, tuple[str, ...], Reward]:
    name = ALIASES.get(choice.use, choice.use)
    if name in ABSENT:
        raise ConfigError(f"rewards: {choice.use!r}: {ABSENT[name]}, rlvr. Fix: one of {listed(REWARDS)}.")
    if name not in REWARDS:
        known = [*REWARDS, *ALIASES]
        raise ConfigError(
            f"rewards: no reward is named {choice.use!r}, rlvr.{did_you_mean(choice.use, known)} Known: {listed(known)}. Fix:"
            " one of them."
        )
    module, _, attribute = REWARDS[name].partition(":")
    target: Any = getattr(importlib.import_module(module), attribute)
    fields = [one.name for one in attrs.fields(target)]
    options = json.loads(choice.options)
    for key in options:
        if key not in fields:
            raise ConfigError(
                f"rewards: {choice.use} has no option {key!r}, rlvr.{did_you_mean(key, fields)} It has: {listed(fields)}. Fix:"
                " correct or remove it."
            )
    try:
        return name, choice.weight, choice.tags, target(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rewards: {choice.use}: {error}") from error
