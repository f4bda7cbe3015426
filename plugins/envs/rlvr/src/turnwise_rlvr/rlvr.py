"""Questions with checkable answers: the question is the observation, the action the answer, rules judge it."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from turnwise.errors import ConfigError, EnvironmentFailure
from turnwise_rlvr import options as check
from turnwise_rlvr import tasks
from turnwise_rlvr.rewards import Verdict
from turnwise_rlvr.rewards.choice import letters
from turnwise_rlvr.rewards.texts import after_thinking
from turnwise_rlvr.task import Task

UNKNOWN = "I do not know."
NO_ANSWER = "There was no answer."
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class Rlvr:
    """The environment `rlvr`; its options are described in the README. Raises ConfigError for options and rows that cannot
    be used, MachineError for a missing package.

    `num_tasks`: the indices that `reset` takes."""

    def __init__(
        self,
        data: Any,
        rewards: Any,
        columns: dict[str, str] | None = None,
        template: str = "{question}",
        split: Literal["all", "train", "val", "test"] = "all",
        tries: int = 1,
        retry_template: str = "{words} Try again.",
        max_bad_rows: int = 0,
    ) -> None:
        if "{question}" not in template:
            raise ConfigError(
                f"template is {template!r:.120}, rlvr, without {{question}}. Fix: put it where it belongs."
            )
        self._template, self._retry = template, retry_template
        self._tries = check.integer("tries", tries, 1, 1000)
        if split not in tasks.SPLITS:
            raise ConfigError(f"split is {split!r}, rlvr. Fix: one of {', '.join(tasks.SPLITS)}.")
        self._wanted = tasks.Wanted(
            sources=check.sources(data, columns),
            rewards=check.rewards(rewards),
            split=split,
            max_bad_rows=check.integer("max_bad_rows", max_bad_rows, 0, 10**9),
        )
        self._loaded = tasks.load(self._wanted)
        self.num_tasks = len(self._loaded.order)
        self._task: Task | None = None
        self._observation: Any = ""
        self._taken = 0
        self._score = 0.0
        self._over = self._right = False
        self._metrics: dict[str, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the tasks, which every process reads for itself."""
        return {key: value for key, value in self.__dict__.items() if key != "_loaded"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._loaded = tasks.load(self._wanted)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Ask the question of `options["index"]`, modulo `num_tasks`; without one, the question that `seed` draws."""
        index = (options or {}).get("index")
        if index is None:
            drawn = secrets.randbits(63) if seed is None else abs(int(seed))
            index = int(np.random.default_rng(drawn).integers(self.num_tasks))
        task = self._task = self._loaded.tasks[int(self._loaded.order[index % self.num_tasks])]
        self._taken, self._score, self._metrics = 0, 0.0, {}
        self._over = self._right = False
        self._observation = self._asked(task)
        return self._observation, self._info(task)

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Judge an answer. The reward is the score of this answer less that of the try before, so that their sum is the
        score of the last one. The episode ends with a right answer or the last try; after it every step returns the same
        observation with reward 0.

        Raises EnvironmentFailure before the first reset, and where a reward cannot judge."""
        task = self._task
        if task is None:
            raise EnvironmentFailure("rlvr.step was called before reset. Fix: call reset first.")
        if self._over:
            return self._observation, 0.0, True, False, self._info(task)
        score, self._right, words = self._judged(task, after_thinking(action))
        self._taken += 1
        self._over = self._right or self._taken == self._tries
        reward, self._score = score - self._score, score
        self._observation = (
            words if self._over else _filled(self._retry, words=words, left=str(self._tries - self._taken))
        )
        return self._observation, reward, self._over, False, self._info(task)

    def render(self) -> str:
        """The question, and what was said last. Raises EnvironmentFailure before the first reset."""
        if self._task is None:
            raise EnvironmentFailure("rlvr has no question before reset. Fix: call reset first.")
        return f"{self._task.text}\n\n{self._observation}" if self._taken else self._task.text

    def close(self) -> None:
        """Nothing is held; may be called twice."""

    def _judged(self, task: Task, answer: str) -> tuple[float, bool, str]:
        """The weighted score of an answer, whether every reward gives all, and what the first that does not says."""
        judges = [one for one in self._loaded.rewards if one.applies(task)]
        verdicts = [one.reward.judge(task, answer) if answer else Verdict(0.0, NO_ANSWER) for one in judges]
        failed = [verdict for verdict in verdicts if not verdict.right]
        self._metrics = {"no_answer": float(not answer)}
        for one, verdict in zip(judges, verdicts):
            self._metrics |= {f"score_{one.name}": verdict.score, **dict(verdict.metrics)}
        score = sum(one.weight * verdict.score for one, verdict in zip(judges, verdicts))
        return score, not failed, (failed or verdicts)[0].words

    def _asked(self, task: Task) -> Any:
        """The question in its template: a text, or messages of which the last has the template."""
        listed = "\n".join(f"{letter}. {text}" for letter, text in zip(letters(task), task.choices))
        messages = () if isinstance(task.question, str) else task.question
        question = task.question if isinstance(task.question, str) else messages[-1]["content"]
        if listed and "{choices}" not in self._template:
            question = f"{question}\n{listed}"
        text = _filled(self._template, question=question, choices=listed)
        return [*map(dict, messages[:-1]), {"role": "user", "content": text}] if messages else text

    def _info(self, task: Task) -> dict[str, Any]:
        digest = hashlib.sha256(f"{task.where}\n{task.text}".encode()).hexdigest()[:16]
        told = str(self._observation) if self._taken else ""
        return {
            "state_key": (digest, self._taken, told, self._over),
            "success": self._right,
            "actions": self._hints(task),
            "metrics": {"tries": float(self._taken), **self._metrics},
        }

    def _hints(self, task: Task) -> list[str]:
        """The known answer, then others that a player may give."""
        others = list(letters(task)) if task.choices else list(self._loaded.hints.get(task.tag, ()))
        judges = [one.reward for one in self._loaded.rewards if one.applies(task) and task.answers]
        first = [judges[0].known(task)] if judges else []
        return [*first, *(one for one in others if one not in first)] or [UNKNOWN]


def _filled(template: str, **values: str) -> str:
    """The template with its placeholders replaced; every other brace stays, as LaTeX has many."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)
