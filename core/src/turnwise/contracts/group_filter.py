"""Group filters: which trajectories train, decided after scores and before statistics."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from attrs import frozen

from turnwise.data.batch import Table


@frozen
class FilterContext:
    """What a filter is built with."""

    seed: int = 0


class GroupFilter(Protocol):
    """Built as `Filter(config, context)`; pure numpy over the trajectory table."""

    def keep(self, trajectories: Table) -> np.ndarray:
        """bool [N]: True for trajectories that train. The dropped stay in the metrics and are not replaced."""
        ...
