"""StarPO-S: only the groups whose scores are most uncertain train (Wang et al. 2025, arXiv 2504.20073)."""

from __future__ import annotations

import math

import numpy as np

from turnwise.contracts.group_filter import FilterContext
from turnwise.data.batch import Table
from turnwise_filters.config import TopSpreadConfig
from turnwise_filters.spread import spread_of

_ROUNDING = 1e-9
"""Two σ are equal within this share: scores 0 0 ½ ½ and 0 0 ½ have the same σ and another last bit."""


class TopSpread:
    """Keeps ceil(keep·G) of the G groups that still have a member: those of the highest σ, at σ equal within a
    billionth those of the lower number."""

    def __init__(self, config: TopSpreadConfig | None, context: FilterContext) -> None:
        self.share = (config or TopSpreadConfig()).keep

    def keep(self, trajectories: Table) -> np.ndarray:
        """bool [N]: True for the trajectories of the kept groups."""
        spread = spread_of(trajectories)
        alive = np.flatnonzero(spread.members > 0)
        # Rounded up, but not for rounding's sake: 0.07 of 100 is 7, though 0.07 * 100 > 7.
        count = math.ceil(self.share * len(alive) - 1e-9)
        kept = np.zeros(len(spread.members), np.bool_)
        kept[alive[_by_spread(spread.std[alive])[:count]]] = True
        return kept[spread.group]


def _by_spread(std: np.ndarray) -> np.ndarray:
    """int64 [G]: the order of float64 σ [G] from the highest to the lowest, stable among those that are equal within
    `_ROUNDING`."""
    falling = np.argsort(-std, kind="stable")
    ordered = std[falling]
    level = np.empty(len(std), np.int64)
    # A level begins where a σ is below the one before it by more than rounding.
    level[falling] = np.cumsum(ordered < np.concatenate([ordered[:1], ordered[:-1]]) * (1.0 - _ROUNDING))
    # Stable: within a level the lower group number comes first, whatever rounding made of the σ.
    return np.argsort(level, kind="stable")
