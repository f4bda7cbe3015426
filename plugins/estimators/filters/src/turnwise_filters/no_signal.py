"""Groups whose scores are all equal do not train: an estimator that compares within groups gives them 0 anyway."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.group_filter import FilterContext
from turnwise.data.batch import Table
from turnwise_filters.spread import SIGNAL, spread_of


class NoSignal:
    """Drops the groups with σ ≤ 1e-6 (σ unbiased, over scores), so also those with one member left."""

    def __init__(self, config: None, context: FilterContext) -> None:
        pass

    def keep(self, trajectories: Table) -> np.ndarray:
        """bool [N]: True for the trajectories of groups with a signal."""
        spread = spread_of(trajectories)
        return (spread.std > SIGNAL)[spread.group]
