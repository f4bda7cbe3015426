"""What a checkpoint keeps of a group: written as plain data, and looked at part by part before it is taken up.

The files of a checkpoint have digests; what passes them here is what an older version wrote, or what somebody has
edited, and an error of another kind would come steps later, from the middle of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
from attrs import asdict

from turnwise.contracts.rollout import Played, Record
from turnwise.data.trajectory import Generation, Sample, Trajectory, Turn

LARGEST = 2**31
"""No attempt and no replacement has a greater number: seeds are drawn from 64 bits."""


def written(record: Record) -> list[Any]:  # Any: as data.exact writes it
    """What an attempt has behind it."""
    generations = [[turn, asdict(one, recurse=False)] for turn, one in record.generations.items()]
    return [generations, list(record.digests)]


def record(generations: Any, digests: Any) -> Record:  # Any: as `written`
    """Undo `written`. Raises ValueError, TypeError."""
    found = {_number(turn): Generation(**one) for turn, one in generations}
    for one in found.values():
        _expect(isinstance(one.text, str) and isinstance(one.finish, str) and isinstance(one.extras, Mapping))
        if one.ids is not None:
            _expect(_column(one.ids, "iu", one.tokens))
        for values, kinds in ((one.logprobs, "f"), (one.versions, "iu")):
            _expect(values is None or _column(values, kinds, one.tokens))
    _expect(isinstance(digests, list) and all(isinstance(digest, str) for digest in digests))
    return Record(found, digests)


def played(trajectories: Any, samples: Any, identity: tuple[str, int, int, int]) -> Played:  # Any: as it was read
    """An ended episode of (tag, group, member, seed). Raises ValueError."""
    _expect(isinstance(trajectories, list) and isinstance(samples, list) and len(trajectories) == len(samples))
    for one, rows in zip(trajectories, samples):
        _expect(isinstance(one, Trajectory) and isinstance(rows, list))
        _expect((one.tag, one.group, one.member, one.seed) == identity)
        _expect(isinstance(one.turns, tuple) and all(_turn(turn) for turn in one.turns))
        _expect(isinstance(one.stop_reason, str) and isinstance(one.role, str) and _metrics(one.metrics))
        _expect(one.success is None or isinstance(one.success, bool | np.bool_))
        _expect(isinstance(one.images, tuple) and all(isinstance(image, np.ndarray) for image in one.images))
        _number(one.attempt)
        _expect(all(isinstance(row, Sample) and _sample(row, one) for row in rows))
    return Played(trajectories, samples, None)


def numbers(pairs: Any) -> dict[int, int]:  # Any: as it was read
    """Pairs of a member and a number below LARGEST. Raises ValueError, TypeError."""
    return {_number(member): _number(value) for member, value in pairs}


def counts(found: Any) -> dict[str, int]:  # Any: as it was read
    """Counts by name. Raises ValueError, AttributeError."""
    _expect(all(isinstance(name, str) and type(count) is int for name, count in found.items()))
    return dict(found)


def failure(serial: Any, member: Any, attempt: Any, line: Any) -> tuple[tuple[int, int, int], str]:  # Any: as read
    """A failed attempt and what was told of it. Raises ValueError."""
    _expect(type(serial) is int and isinstance(line, str))
    return (serial, _number(member), _number(attempt)), line


def _number(value: Any) -> int:
    # `type`: True is an int, too.
    _expect(type(value) is int and 0 <= value < LARGEST)
    return int(value)


def _expect(holds: bool) -> None:
    if not holds:
        raise ValueError("not what was written")


def _column(values: Any, kinds: str, length: int | None = None) -> bool:
    """One dimension, of a numpy dtype of these kinds."""
    right = isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in kinds
    return right and length in (None, len(values))


def _metrics(found: Any) -> bool:
    return isinstance(found, Mapping) and all(isinstance(value, Real | np.bool_) for value in found.values())


def _places(images: Any) -> bool:
    """Which images of a trajectory a prompt holds."""
    return isinstance(images, tuple) and all(isinstance(place, Integral) for place in images)


def _turn(turn: Any) -> bool:
    if not isinstance(turn, Turn) or not _column(turn.prompt_ids, "iu") or not _column(turn.response_ids, "iu"):
        return False
    length = len(turn.response_ids)
    return (
        _column(turn.response_mask, "b", length)
        and (turn.logprobs is None or _column(turn.logprobs, "f", length))
        and _column(turn.versions, "iu", length)
        and isinstance(turn.reward, Real)
        and all(isinstance(text, str) for text in (turn.text, turn.action, turn.finish))
        and _places(turn.images)
        and _metrics(turn.metrics)
        and isinstance(turn.extras, Mapping)
    )


def _sample(row: Sample, trajectory: Trajectory) -> bool:
    if not _column(row.input_ids, "iu"):
        return False
    length = len(row.input_ids)
    return (
        _column(row.response_mask, "b", length)
        and _column(row.turn, "iu", length)
        # Other numbers would take the tokens of another trajectory's turns.
        and bool((row.turn < len(trajectory.turns)).all())
        and (row.logprobs is None or _column(row.logprobs, "f", length))
        and _column(row.versions, "iu", length)
        and _places(row.images)
        and isinstance(row.columns, Mapping)
        and all(isinstance(c, np.ndarray) and c.shape[:1] == (length,) for c in row.columns.values())
    )
