"""Updates that made no step: one is bad luck, several in a row are the end."""

from __future__ import annotations

import logging

from turnwise.data.rows import Update, UpdateResult
from turnwise.errors import TrainerError

log = logging.getLogger("turnwise")


class TooManySkipped(TrainerError):
    """Too many updates in a row made no step; the weights are those of the last one that did."""


class Skipped:
    """Counts a role's skipped updates in a row, from step to step; a checkpoint does not hold it. `limit`: as many are
    borne."""

    def __init__(self, role: str, limit: int) -> None:
        self._role, self._limit, self._row = role, limit, 0

    def count(self, update: Update, result: UpdateResult) -> None:
        """Raises TooManySkipped: one more in a row than the limit."""
        # In a row: one in many is an outlier of the data, and the optimizer's state knows nothing of it.
        self._row = self._row + 1 if result.skipped else 0
        if not result.skipped:
            return
        found = f"loss {result.loss:g}, gradient norm {result.grad_norm:g}, learning rate {update.lr:g}"
        if self._row > self._limit:
            raise TooManySkipped(
                f"{self._row} update(s) of {self._role} in a row made no step, for loss or gradient were not finite"
                f" (the last: {found}). Fix: a lower learning_rate, model_args.dtype: fp32, or a larger"
                " max_skipped_updates"
            )
        log.warning("an update of %s made no step, for its loss or gradient is not finite (%s)", self._role, found)
