"""From rows to the tasks of a split: bad rows are listed, the split goes by content, sources are mixed by weight."""

from __future__ import annotations

import hashlib
import json
import logging
import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from attrs import frozen

from turnwise.errors import ConfigError, did_you_mean, listed
from turnwise_rlvr import arithmetic
from turnwise_rlvr.files import rows
from turnwise_rlvr.options import RewardChoice, Source
from turnwise_rlvr.rewards import Applied, applied
from turnwise_rlvr.task import Task

log = logging.getLogger(__name__)

SPLITS = ("all", "train", "val", "test")
LISTED = 5
"""Bad rows that a message names."""
HINTS = 100
"""Answers of other questions that the random player may give."""
LARGEST_EPOCH = 10_000_000
GENERATORS = {"arithmetic": arithmetic.rows}
"""Name → function of its options that gives rows."""


@frozen(eq=False)
class Tasks:
    """The tasks of a split. `order[i]`: which task has the index i. Where sources have weights, a source whose rows are
    fewer than its share has them more than once, evenly spread. `hints`: tag → answers of its questions, at most `HINTS`.
    `rewards`: those that judge them, in the order of the YAML."""

    tasks: tuple[Task, ...]
    order: np.ndarray
    hints: Mapping[str, tuple[str, ...]]
    rewards: tuple[Applied, ...]


@frozen
class Wanted:
    """What is read: the sources, the rewards that must be able to judge every task, the split, and how many bad rows are
    left out instead of refused."""

    sources: tuple[Source, ...]
    rewards: tuple[RewardChoice, ...]
    split: str
    max_bad_rows: int


_loading = Lock()


def load(wanted: Wanted) -> Tasks:
    """The tasks, read once in a process. Raises ConfigError with at most `LISTED` bad rows, MachineError for a missing
    package."""
    # Environments are built in threads of their own, all at once.
    with _loading:
        return _load(wanted)


@lru_cache(maxsize=16)
def _load(wanted: Wanted) -> Tasks:
    rewards = applied(wanted.rewards)
    bad: list[str] = []
    parts = [_of_source(source, rewards, bad) for source in wanted.sources]
    shown = "; ".join(bad[:LISTED]) + (f"; and {len(bad) - LISTED} more" if len(bad) > LISTED else "")
    if len(bad) > wanted.max_bad_rows:
        raise ConfigError(
            f"data: {len(bad)} bad row{'s' * (len(bad) > 1)}, rlvr: {shown}. Fix: repair them, or max_bad_rows: {len(bad)} to"
            " leave them out."
        )
    if bad:
        log.warning("rlvr leaves out %d bad rows: %s", len(bad), shown)
    kept = [[task for task in part if wanted.split in ("all", split_of(task))] for part in parts]
    for source, part, whole in zip(wanted.sources, kept, parts):
        if not part:
            tags = f" with the tags {listed(source.tags)}" if source.tags else ""
            rest = f" in split {wanted.split!r} (of {len(whole)} in all)" if whole else tags
            raise ConfigError(f"data: no question{rest} in {source.name}, rlvr. Fix: more rows, or split: all.")
    tasks = tuple(task for part in kept for task in part)
    order = mixed([len(part) for part in kept], [source.weight for source in wanted.sources])
    return Tasks(tasks, order, _hints(tasks), rewards)


def split_of(task: Task) -> str:
    """A fifth `test`, a tenth `val`, the rest `train`, by the SHA-256 of the question; case, white space and the form of
    characters do not count."""
    content = " ".join(unicodedata.normalize("NFKC", task.text).casefold().split())
    share = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") / 2**64
    return "test" if share < 0.2 else "val" if share < 0.3 else "train"


def mixed(sizes: list[int], weights: list[float | None]) -> np.ndarray:
    """int64: the tasks of all sources in one order in which every stretch holds its share of each. Without weights every
    task comes once; with weights an epoch is as long as it takes for every task to come, and those of a source of too
    few come again.

    Raises ConfigError where that is longer than `LARGEST_EPOCH`."""
    given = [weight for weight in weights if weight is not None]
    shares = np.array(given if given else sizes, float)
    shares /= shares.sum()
    length = max(size / share for size, share in zip(sizes, shares))
    if length > LARGEST_EPOCH:
        raise ConfigError(
            f"data: with these weights an epoch has {length:,.0f} questions, more than {LARGEST_EPOCH:,}, rlvr. Fix: weights"
            " closer to the numbers of rows."
        )
    counts = [max(size, round(length * share)) for size, share in zip(sizes, shares)]
    starts = np.cumsum([0, *sizes[:-1]])
    rows_of = [start + np.arange(count) % size for start, count, size in zip(starts, counts, sizes)]
    places = [(np.arange(count) + 0.5) / count for count in counts]
    return np.concatenate(rows_of)[np.argsort(np.concatenate(places), kind="stable")].astype(np.int64)


def _of_source(source: Source, rewards: tuple[Applied, ...], bad: list[str]) -> list[Task]:
    """The tasks of a source that it takes; what is wrong with the other rows goes to `bad`."""
    found = []
    columns = dict(source.columns)
    # A column that only some rewards read may be missing from a file.
    answered = all(one.reward.needs_answer for one in rewards)
    for where, row in _rows_of(source, columns, answered):
        if not isinstance(row, dict):
            bad.append(f"{where} {row}")
            continue
        tag = source.tag if row.get(columns["tag"]) is None else str(row[columns["tag"]])
        if source.tags and tag not in source.tags:
            continue
        task = _task(row, columns, tag, where)
        wrong = task if isinstance(task, str) else _unjudged(task, rewards, columns["answer"])
        if wrong is not None:
            bad.append(f"{where} {wrong}")
        elif isinstance(task, Task):
            found.append(task)
    return found


def _unjudged(task: Task, rewards: tuple[Applied, ...], column: str) -> str | None:
    """Why the rewards cannot judge a task, or None."""
    judges = [one.reward for one in rewards if one.applies(task)]
    if not judges:
        return f"has the tag {task.tag!r}, for which there is no reward"
    if not task.answers and any(reward.needs_answer for reward in judges):
        return f"has no answer in {column!r}"
    return next((wrong for reward in judges if (wrong := reward.wrong_with(task)) is not None), None)


def _rows_of(source: Source, columns: Mapping[str, str], answered: bool) -> Iterator[tuple[str, dict[str, Any] | str]]:
    if source.generate:
        if source.generate not in GENERATORS:
            raise ConfigError(
                f"data: no generator is named {source.generate!r}, rlvr.{did_you_mean(source.generate, GENERATORS)} Known:"
                f" {listed(GENERATORS)}. Fix: one of them."
            )
        made = GENERATORS[source.generate](dict(source.options))
        for number, values in enumerate(made, 1):
            yield f"{source.generate}, question {number}", {columns[key]: value for key, value in values.items()}
        return
    needed = [columns["question"], *([columns["answer"]] if answered else [])]
    wanted = [name for name in columns.values() if name not in needed]
    for file in source.files:
        for number, row in rows(file, needed, wanted):
            yield f"{file}, line {number}", row


def _task(row: Mapping[str, Any], columns: Mapping[str, str], tag: str, where: str) -> Task | str:
    """The task of a row, or what is wrong with it."""
    question = _question(row.get(columns["question"]))
    if question is None:
        return f"has no question in {columns['question']!r}: {row.get(columns['question'])!r:.60}"
    choices = row.get(columns["choices"]) or ()
    if not isinstance(choices, list | tuple) or not all(isinstance(one, str) for one in choices):
        return f"has choices that are no list of texts: {choices!r:.60}"
    answers = _answers(row.get(columns["answer"]))
    if answers is None:
        return f"has no answer in {columns['answer']!r}: {row.get(columns['answer'])!r:.60}"
    return Task(question, answers, tag, tuple(choices), where)


def _question(value: Any) -> str | tuple[Mapping[str, str], ...] | None:
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        # Messages as the text of their JSON, as the field's files have them.
        try:
            value = json.loads(value)
        except ValueError:
            return value
    if isinstance(value, str):
        return value if value.strip() else None
    whole = isinstance(value, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in value
    )
    if not whole or not value or value[-1]["role"] != "user" or not value[-1]["content"].strip():
        return None
    return tuple({"role": one["role"], "content": one["content"]} for one in value)


def _answers(value: Any) -> tuple[str, ...] | None:
    """The accepted answers; None where one of them is none."""
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    found = []
    for one in values:
        text = str(one).strip() if isinstance(one, str | int | float) else ""
        if not text:
            return None
        found.append(text)
    return tuple(found)


def _hints(tasks: tuple[Task, ...]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for task in tasks:
        seen = found.setdefault(task.tag, {})
        if task.answers and len(seen) < HINTS:
            seen[task.answers[0]] = None
    return {tag: tuple(sorted(seen)) for tag, seen in found.items()}
