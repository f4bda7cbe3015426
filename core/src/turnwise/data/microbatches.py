"""Cutting samples into micro-batches: index arithmetic over their lengths, never through a sample, longest first."""

from __future__ import annotations

import numpy as np


def by_rows(lengths: np.ndarray, rows: int) -> list[np.ndarray]:
    """Indices into `lengths` [S] in groups of at most `rows`, each an int64 array; equal lengths keep their order.

    Sorted by length, so that a group pads little; longest first, so that a group too large for the memory fails at once.
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
        width = max(1, int(lengths[order[start]]))
        rows = max(1, budget // width)
        groups.append(order[start : start + rows])
        start += rows
    return groups


def cut(lengths: np.ndarray, rows: int, budget: int | None = None) -> list[np.ndarray]:
    """`by_tokens` if there is a budget, else `by_rows`."""
    return by_rows(lengths, rows) if budget is None else by_tokens(lengths, budget)


def _longest_first(lengths: np.ndarray) -> np.ndarray:
    return np.argsort(-np.asarray(lengths, np.int64), kind="stable")
