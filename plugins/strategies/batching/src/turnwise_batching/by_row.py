"""`copy`, `delete`, `random_sample`, `auto`, `none`: updates of U rows, and what becomes of the N mod U rows that do
not fill one."""

from __future__ import annotations

import math

import numpy as np

from turnwise.contracts.batch_adjust import AdjustContext, AdjustInput, PlannedUpdate
from turnwise.errors import ConfigError
from turnwise_batching.config import NoOptions


class Copy:
    """Adds U − N mod U copies of random rows; a row drawn c times gives c + 1 rows of weight 1/(c + 1)."""

    def __init__(self, config: NoOptions, context: AdjustContext) -> None:
        self.unit = _checked_unit(context)

    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        """One epoch of updates of exactly U rows."""
        return _filled(len(rows.trajectory), self.unit, np.random.default_rng(rows.seed))

    def updates(self, rows: int) -> int:
        """N/U, rounded up."""
        return math.ceil(rows / self.unit)


class Delete:
    """Drops N mod U random rows. Fewer than U rows are filled up as `copy` does."""

    def __init__(self, config: NoOptions, context: AdjustContext) -> None:
        self.unit = _checked_unit(context)

    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        """One epoch of updates of exactly U rows."""
        n, rng = len(rows.trajectory), np.random.default_rng(rows.seed)
        return _filled(n, self.unit, rng) if n < self.unit else _cut(rng.permutation(n)[: n - n % self.unit], self.unit)

    def updates(self, rows: int) -> int:
        """N/U, rounded down, and at least one."""
        # Fewer rows than a unit are filled up to one.
        return max(1, rows // self.unit)


class RandomSample:
    """Exactly one update of U random rows, also when N is a multiple of U. Fewer than U rows are filled up as `copy`
    does."""

    def __init__(self, config: NoOptions, context: AdjustContext) -> None:
        self.unit = _checked_unit(context)

    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        """One update of exactly U rows."""
        n, rng = len(rows.trajectory), np.random.default_rng(rows.seed)
        return _filled(n, self.unit, rng) if n < self.unit else _cut(rng.permutation(n)[: self.unit], self.unit)

    def updates(self, rows: int) -> int:
        """One."""
        return 1


class Auto:
    """`copy` if N < U or if the remainder N mod U is at least U/2, else `delete`."""

    def __init__(self, config: NoOptions, context: AdjustContext) -> None:
        self.unit = _checked_unit(context)
        self.copy, self.delete = Copy(config, context), Delete(config, context)

    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        """One epoch of updates of exactly U rows."""
        return self._choice(len(rows.trajectory)).plan(rows)

    def updates(self, rows: int) -> int:
        """As the policy that is chosen for this many rows."""
        return self._choice(rows).updates(rows)

    def _choice(self, rows: int) -> Copy | Delete:
        # ROLL compares the remainder with N/2.
        return self.copy if rows < self.unit or 2 * (rows % self.unit) >= self.unit else self.delete


class Remainder:
    """`none`: nothing is added or dropped; the remainder forms a smaller last update."""

    def __init__(self, config: NoOptions, context: AdjustContext) -> None:
        self.unit = _checked_unit(context)

    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        """One epoch: updates of U rows, the last of what is left."""
        return _cut(np.random.default_rng(rows.seed).permutation(len(rows.trajectory)), self.unit)

    def updates(self, rows: int) -> int:
        """N/U, rounded up."""
        return math.ceil(rows / self.unit)


def _checked_unit(context: AdjustContext) -> int:
    if context.unit < 1:
        raise ConfigError(
            f"batch_adjust_mode: the effective batch U (per device × accumulation × ranks) is {context.unit}, not"
            " positive. Fix: sizes of at least 1"
        )
    return context.unit


def _filled(n: int, unit: int, rng: np.random.Generator) -> list[PlannedUpdate]:
    """All n rows and random copies up to the next multiple of `unit`, shuffled. No row is copied a second time before
    every row was once."""
    if not n:
        return []
    # resize repeats the permutation: every row is copied once before one is copied twice.
    copies = np.resize(rng.permutation(n), -n % unit)
    rows = rng.permutation(np.concatenate([np.arange(n), copies]))
    # A row and its copies weigh 1 together: copies fill the update, and the row counts no more than others.
    return _cut(rows, unit, 1.0 / np.bincount(rows)[rows])


def _cut(rows: np.ndarray, unit: int, weights: np.ndarray | None = None) -> list[PlannedUpdate]:
    """Updates of `unit` rows in this order; the last may be smaller."""
    rows = rows.astype(np.int64)
    weights = np.ones(len(rows)) if weights is None else weights
    return [PlannedUpdate(rows=rows[i : i + unit], weights=weights[i : i + unit]) for i in range(0, len(rows), unit)]
