"""Cutting samples into micro-batches, padded or packed: index arithmetic over their lengths, never through a sample,
longest first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def by_rows(lengths: np.ndarray, rows: int) -> list[np.ndarray]:
    """Indices into `lengths` [S] in groups of at most `rows`, each an int64 array; equal lengths keep their order.

    Sorted by length, so that a group pads little; longest first, so that a group too large for the memory fails at
    once.
    """
    if rows < 1:
        raise ValueError(f"a micro-batch needs at least one row, got {rows}")
    order = _longest_first(lengths)
    return [order[start : start + rows] for start in range(0, len(order), rows)]


def by_tokens(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Indices into `lengths` [S] in groups whose padded size (rows × longest) is at most `budget` tokens.

    A sample longer than the budget gets a group of its own. Order as in `by_rows`.
    """
    if budget < 1:
        raise ValueError(f"a token budget must be at least 1, got {budget}")
    lengths = np.asarray(lengths)
    order = _longest_first(lengths)
    groups, start = [], 0
    while start < len(order):
        # Longest first, so the first sample of a group is its width.
        width = max(1, int(lengths[order[start]]))
        rows = max(1, budget // width)
        groups.append(order[start : start + rows])
        start += rows
    return groups


def cut(lengths: np.ndarray, rows: int, budget: int | None = None) -> list[np.ndarray]:
    """`by_tokens` if there is a budget, else `by_rows`."""
    return by_rows(lengths, rows) if budget is None else by_tokens(lengths, budget)


def pack(lengths: np.ndarray, width: int) -> list[np.ndarray]:
    """Indices into `lengths` [S] in rows of at most `width` tokens, samples one after the other: best fit, longest
    first; the fullest row first.

    Best fit: a sample goes where the least room is left over. One longer than `width` gets a row of its own.
    """
    if width < 1:
        raise ValueError(f"a packed row needs room for at least 1 token, got {width}")
    lengths = np.asarray(lengths, np.int64)
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in _longest_first(lengths).tolist():
        length = int(lengths[index])
        # −1 sorts before every row, so a row with exactly this room is found too.
        at = bisect_left(room, (length, -1))
        if at < len(room):
            left, row = room.pop(at)
            rows[row].append(index)
        else:
            left, row = max(width, length), len(rows)
            rows.append([index])
        insort(room, (left - length, row))
    # The fullest first, so that a micro-batch too large for the memory fails at once.
    return sorted((np.array(row, np.int64) for row in rows), key=lambda row: -int(lengths[row].sum()))


def packed(lengths: np.ndarray, budget: int, one_row: bool = False) -> list[list[np.ndarray]]:
    """Micro-batches of packed rows, each a list of index arrays, whose padded size (rows × fullest) is at most `budget`
    tokens.

    Rows are as wide as the longest sample: attention with a dense mask pays for their width squared. `one_row`, for
    attention that skips
    what is masked: every micro-batch is one row of up to `budget` tokens, without padding. A sample longer than the
    budget stands alone.
    """
    if budget < 1:
        raise ValueError(f"a token budget must be at least 1, got {budget}")
    lengths = np.asarray(lengths, np.int64)
    if not len(lengths):
        return []
    width = budget if one_row else max(1, int(lengths.max()))
    rows = pack(lengths, width)
    at_a_time = 1 if one_row else max(1, budget // width)
    return [rows[start : start + at_a_time] for start in range(0, len(rows), at_a_time)]


def non_padding_share(lengths: np.ndarray, groups: Sequence[Sequence[np.ndarray]]) -> float:
    """Share of the computed positions that hold a token, over micro-batches of rows of indices (a row of one index: an
    unpacked sample)."""
    lengths = np.asarray(lengths, np.int64)
    fills = [[int(lengths[row].sum()) for row in group] for group in groups]
    computed = sum(len(fill) * max(fill) for fill in fills)
    return sum(map(sum, fills)) / computed if computed else 1.0


def _longest_first(lengths: np.ndarray) -> np.ndarray:
    # Stable, so that equal lengths keep the order of the batch.
    return np.argsort(-np.asarray(lengths, np.int64), kind="stable")
