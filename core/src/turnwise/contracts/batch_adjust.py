"""Batch-adjust policies: index arithmetic that turns the rows of a pipeline step into optimizer updates."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from attrs import frozen


@frozen
class AdjustContext:
    """`unit`: U = per_device_train_batch_size × gradient_accumulation_steps × data-parallel size. `rollout_batch_size`:
    trajectories a step."""

    unit: int
    rollout_batch_size: int


@frozen(eq=False)
class AdjustInput:
    """`trajectory` int64 [N]: the trajectory of each row. `trajectories`: how many arrived, those without rows
    included. `seed`: of this step."""

    trajectory: np.ndarray
    trajectories: int
    seed: int


@frozen(eq=False)
class PlannedUpdate:
    """`rows` int64 [n] of one optimizer update (a row may stand twice) and their `weights` float64 [n]."""

    rows: np.ndarray
    weights: np.ndarray


class BatchAdjust(Protocol):
    """Built as `Policy(config, context)`."""

    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        """One epoch of updates. Deterministic under the seed; invents no row. An update may be empty: it counts, but
        takes no step."""
        ...

    def updates(self, rows: int) -> int:
        """How many updates `plan` makes of this many rows (more than zero); `turnwise plan` asks it."""
        ...
