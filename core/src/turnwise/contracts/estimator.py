"""Advantage estimators: pure numpy, batch in, advantages and returns out."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
from attrs import frozen

from turnwise.contracts.capabilities import Capabilities
from turnwise.data.batch import Batch
from turnwise.data.normalise import RewardNormalization


@frozen
class EstimatorContext:
    """What an estimator is built with: the run's `gamma` and `lambd` come by config; this holds the seed alone."""

    seed: int = 0


@frozen
class EstimatorCapabilities(Capabilities):
    """What must be known before one is built. `needs`: token columns that must exist first (`values`: a critic runs).
    `compares_in_groups`:
    True if a group of one leaves it no other trajectory to compare with; False if it has something to compare then,
    whatever the `reward_normalization`; None if that decides."""

    kind: ClassVar[str] = "advantage_estimator"
    needs: frozenset[str] = frozenset()
    compares_in_groups: bool | None = None


class AdvantageEstimator(Protocol):
    """Built as `Estimator(config, context)`; what must be known before it declares as EstimatorCapabilities.

    `token_rewards`: True if it recurses over `token_level_rewards` (a KL penalty in the reward is then subtracted
    there; else it is subtracted from the advantages, discounted). `whiten`: the default of `whiten_advantages`.
    `normalization`: the settled settings by which it normalises scores, for the metric `critic/reward/mean` and its
    healthy range; None: it normalises none.
    """

    token_rewards: bool
    whiten: bool
    normalization: RewardNormalization | None

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64 [T] over the batch's tokens, zero where the response mask is False."""
        ...
