"""StarPO-S: only the groups whose scores are most uncertain train (Wang et al. 2025, arXiv 2504.20073)."""

from __future__ import annotations

import math

import numpy as np

from turnwise.contracts.group_filter import FilterContext
from turnwise.data.batch import Table
from turnwise_filters.config import TopSpreadConfig
from turnwise_filters.spread import spread_of


class TopSpread:
    """Keeps ceil(keep·G) of the G groups that still have a member: those of the highest σ, at equal σ those of the lower number."""

    def __init__(self, config: TopSpreadConfig | None, context: FilterContext) -> None:
        self.share = (config or TopSpreadConfig()).keep

    def keep(self, trajectories: Table) -> np.ndarray:
        """bool [N]: True for the trajectories of the kept groups."""
        spread = spread_of(trajectories)
        alive = np.flatnonzero(spread.members > 0)
        count = math.ceil(self.share * len(alive) - 1e-9)  # 0.1 of 30 is 3, though 0.1 * 30 > 3
        kept = np.zeros(len(spread.members), np.bool_)
        kept[alive[np.argsort(-spread.std[alive], kind="stable")[:count]]] = True
        return kept[spread.group]
