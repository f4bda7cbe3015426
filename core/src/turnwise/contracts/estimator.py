"""Advantage estimators: pure numpy, batch in, advantages and returns out."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from attrs import frozen

from turnwise.data.batch import Batch


@frozen
class EstimatorContext:
    """What an estimator is built with: the run's `gamma` and `lambd` come by config; this holds the seed alone."""

    seed: int = 0


class AdvantageEstimator(Protocol):
    """Built as `Estimator(config, context)`.

    `needs`: token columns that must exist first (`values`: a critic runs). `token_rewards`: True if it recurses over
    `token_level_rewards` (a KL penalty in the reward is then subtracted there; else it is subtracted from the advantages, discounted).
    `whiten`: the default of `whiten_advantages`. Optional `normalization`: the settled RewardNormalization, for the metric
    `critic/reward/mean`. Optional `compares_in_groups`: True if a group of one leaves it no other trajectory to compare with; False if it
    has something to compare then, whatever the `reward_normalization`.
    """

    needs: frozenset[str]
    token_rewards: bool
    whiten: bool

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64 [T] over the batch's tokens, zero where the response mask is False."""
        ...
