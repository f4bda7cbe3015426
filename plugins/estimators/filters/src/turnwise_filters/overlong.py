"""Trajectories that ran out of room do not train: their score says nothing about how they would have ended."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.group_filter import FilterContext
from turnwise.data.batch import Table


class Overlong:
    """Drops the trajectories with stop reason `length`; the others of their groups stay."""

    def __init__(self, config: None, context: FilterContext) -> None:
        pass

    def keep(self, trajectories: Table) -> np.ndarray:
        """bool [N]: True for the trajectories that ended for another reason."""
        return np.asarray(trajectories["stop_reason"] != "length", np.bool_)
