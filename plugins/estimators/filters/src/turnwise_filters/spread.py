"""The spread of scores in every group, each trajectory once."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from turnwise.data.batch import Table

SIGNAL = 1e-6
"""σ at or below this is no signal: normalisation gives such a group 0."""


@frozen(eq=False)
class Spread:
    """`group` int64 [N]: each trajectory's group as 0…G−1, in the order of the groups' numbers; `members` float64 [G]:
    how many of the group still train; `std` float64 [G]: the unbiased σ of their scores, 0 for fewer than two."""

    group: np.ndarray
    members: np.ndarray
    std: np.ndarray


def spread_of(trajectories: Table) -> Spread:
    """Among the trajectories that the filters before left (column `trains`; without it, all)."""
    counted = (
        np.asarray(trajectories["trains"], np.bool_)
        if "trains" in trajectories
        else np.ones(len(trajectories), np.bool_)
    )
    numbers, group = np.unique(trajectories["traj_group_id"], return_inverse=True)
    scores, mine = np.asarray(trajectories["scores"], np.float64)[counted], group[counted]
    members = np.bincount(mine, minlength=len(numbers)).astype(np.float64)
    lowest = np.full(len(numbers), np.inf)
    np.minimum.at(lowest, mine, scores)
    # Equal scores, however large, have σ = 0 exactly.
    shifted = scores - lowest[mine]
    mean = np.bincount(mine, weights=shifted, minlength=len(numbers)) / np.maximum(members, 1.0)
    squares = np.bincount(mine, weights=(shifted - mean[mine]) ** 2, minlength=len(numbers))
    # The divisor is held at 1: a group of fewer than two has σ = 0, not a division by zero.
    return Spread(group, members, np.sqrt(squares / np.maximum(members - 1.0, 1.0)))
