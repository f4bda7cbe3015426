"""`by_trajectory`: updates are counted in trajectories, so their number never depends on how many turns were played."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from turnwise.contracts.batch_adjust import AdjustContext, AdjustInput, PlannedUpdate
from turnwise.errors import ConfigError
from turnwise_batching.config import NoOptions


class ByTrajectory:
    """Always rollout_batch_size / U updates. The trajectories that arrived, zero-row ones too, are shuffled and dealt
    into that many nearly equal parts; a trajectory's rows stay together. Nothing is dropped or copied. Without a single
    row there is no update."""

    def __init__(self, config: NoOptions, context: AdjustContext) -> None:
        if context.unit < 1 or context.rollout_batch_size % context.unit:
            raise ConfigError(
                f"batch_adjust_mode by_trajectory: rollout_batch_size {context.rollout_batch_size} is not a multiple of"
                " the effective batch U = per_device_train_batch_size × gradient_accumulation_steps × data-parallel"
                f" size = {context.unit}. Fix: change one of them, or use batch_adjust_mode copy, delete or auto, which"
                " count rows"
            )
        self.parts = context.rollout_batch_size // context.unit

    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        """One epoch: `updates` updates, some empty if fewer trajectories with rows arrived."""
        if not len(rows.trajectory):
            return []
        # Trajectories without rows are dealt too: how many arrived decides, not how many turns they have.
        dealt = np.random.default_rng(rows.seed).permutation(rows.trajectories)
        # The inverse of `dealt`: at which place each trajectory was dealt.
        place = np.empty(rows.trajectories, np.int64)
        place[dealt] = np.arange(rows.trajectories)
        first_of_part = np.cumsum([0] + [len(part) for part in np.array_split(dealt, self.parts)])
        # Stable: the rows of a trajectory stay together and in their order.
        order = np.argsort(place[rows.trajectory], kind="stable")
        cuts = np.searchsorted(place[rows.trajectory][order], first_of_part)
        parts = [order[start:end] for start, end in pairwise(cuts)]
        return [PlannedUpdate(rows=part.astype(np.int64), weights=np.ones(len(part))) for part in parts]

    def updates(self, rows: int) -> int:
        """rollout_batch_size / U, whatever the number of rows."""
        return self.parts
