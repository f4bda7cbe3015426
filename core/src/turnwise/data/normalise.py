"""Reward normalisation: scores over trajectories, returns over turns, and token rewards that sum to the normalised
score."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from attrs import evolve, field, frozen, validators

from turnwise.data.batch import Batch
from turnwise.data.ops import last_sampled, sampled_to_tokens, trains
from turnwise.errors import ConfigError

Grouping = Literal["traj_group_id", "batch", "tags", "traj_id"]
Method = Literal["identity", "mean", "mean_std", "asym_clip"]
Scope = Literal["batch", "group"]

EPSILON = 1e-6
"""Added to σ; a scope whose σ is not above it carries no signal and gives 0."""


def _one_of(*names: str | None) -> Any:
    return validators.in_(names)


@frozen
class RewardNormalization:
    """How rewards are normalised; what is None takes the default of the estimator (see `settle`).

    `grouping`: the scope of μ and σ: `traj_group_id`, `batch`, `tags` (environment tag), or `traj_id` (per-turn returns
    only).
    `method`: `identity`, `mean` (s − μ), `mean_std` ((s − μ)/(σ + 1e-6), σ unbiased); `asym_clip` is accepted and means
    `mean_std`.
    `norm_mean_type`, `norm_std_type`: if either is given, the two replace `method`: μ from the one scope, σ from the
    other (`batch` or `group`, the trajectory group), and a null one means that nothing is subtracted, or divided by.
    `count`: `trajectory` (each counts once in the statistics of scores) or `sample` (once per row, as some frameworks
    do).
    """

    grouping: Grouping | None = field(
        default=None, validator=_one_of(None, "traj_group_id", "batch", "tags", "traj_id")
    )
    method: Method | None = field(default=None, validator=_one_of(None, "identity", "mean", "mean_std", "asym_clip"))
    norm_mean_type: Scope | None = field(default=None, validator=_one_of(None, "batch", "group"))
    norm_std_type: Scope | None = field(default=None, validator=_one_of(None, "batch", "group"))
    count: Literal["trajectory", "sample"] = field(default="trajectory", validator=_one_of("trajectory", "sample"))


def settle(
    settings: RewardNormalization | None,
    method: Method = "identity",
    grouping: Grouping = "traj_group_id",
    unit: Literal["trajectory", "turn"] = "trajectory",
) -> RewardNormalization:
    """`settings` with an estimator's own defaults where they say nothing; estimators call it once, when they are built.

    Raises ConfigError for `grouping: traj_id` where the unit is the trajectory: every scope would have one member.
    """
    settings = settings or RewardNormalization()
    settings = evolve(settings, method=settings.method or method, grouping=settings.grouping or grouping)
    if settings.grouping == "traj_id" and unit == "trajectory":
        raise ConfigError(
            "reward_normalization.grouping: 'traj_id' normalises turns within a trajectory, and this estimator"
            " normalises one score per trajectory. Fix: use traj_group_id, batch or tags, or an estimator of per-turn"
            " returns"
        )
    return settings


def normalise_scores(batch: Batch, settings: RewardNormalization | None) -> np.ndarray:
    """float64 [N]: the normalised score of every trajectory; 0 for those that do not train. Raises ConfigError as
    `settle` does."""
    mean, divisor, live = _score_statistics(batch, settle(settings))
    return np.where(live, (batch.trajectories["scores"] - mean) / divisor, 0.0)


def normalise_turns(batch: Batch, values: np.ndarray, settings: RewardNormalization | None) -> np.ndarray:
    """float64 [K]: `values` [K], one per row of the turn table (per-turn returns), normalised over turns; 0 where the
    trajectory does not train. Every turn counts once, with or without sampled tokens; `count` concerns scores alone."""
    settings = settle(settings, unit="turn")
    owner = batch.turns["trajectory"]
    counted = trains(batch)[owner].astype(np.float64)
    scopes = {name: column[owner] for name, column in _scopes(batch).items()}
    values = np.asarray(values, np.float64)
    mean, divisor, live = _affine(values, settings, scopes, counted)
    return np.where(live & (counted > 0), (values - mean) / divisor, 0.0)


def normalised_token_rewards(batch: Batch, settings: RewardNormalization | None) -> np.ndarray:
    """float64 [T]: `token_level_rewards` such that each trajectory's sum is its normalised score, less the column
    `kl_penalty`.

    Intermediate rewards are kept: r/(σ + 1e-6) where they were earned, and −μ/(σ + 1e-6) at the trajectory's last
    sampled token, with μ and σ of the scores. A scope without signal gives 0 on every token. 0 where nothing was
    sampled and where nothing trains.
    """
    mean, divisor, live = _score_statistics(batch, settle(settings))
    owner = batch.tokens["trajectory"]
    rewards = np.where(live[owner], batch.tokens["token_level_rewards"] / divisor[owner], 0.0)
    last = last_sampled(batch)
    ends = np.flatnonzero((last >= 0) & live)
    # μ is of the score, so it is taken off once: at the end, where a score belongs that is given as one reward.
    rewards[last[ends]] -= mean[ends] / divisor[ends]
    # After the normalisation: the penalty is no reward of the environment, and its scale is β's.
    if "kl_penalty" in batch.tokens:
        rewards -= batch.tokens["kl_penalty"]
    return sampled_to_tokens(batch, rewards[batch.sampled])


def normalise(values: np.ndarray, labels: np.ndarray, method: Method, counted: np.ndarray | None = None) -> np.ndarray:
    """float64 [n]: `values` [n] normalised by `method` among those of equal `labels` [n] (anything that sorts).
    `counted` bool [n]:
    False leaves an entry out of the statistics and gives it 0."""
    values = np.asarray(values, np.float64)
    weights = np.ones(len(values)) if counted is None else np.asarray(counted, np.float64)
    # The labels given are the one scope; by which name it goes means nothing here.
    mean, divisor, live = _affine(
        values, RewardNormalization(grouping="batch", method=method), {"batch": np.asarray(labels)}, weights
    )
    return np.where(live & (weights > 0), (values - mean) / divisor, 0.0)


def _score_statistics(batch: Batch, settings: RewardNormalization) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """μ, divisor and whether there is a signal, each [N]; no signal where the trajectory does not train."""
    kept = trains(batch)
    weights = kept.astype(np.float64)
    if settings.count == "sample":
        # A trajectory without rows then does not count at all.
        weights *= np.bincount(batch.samples["trajectory"], minlength=len(kept))
    mean, divisor, live = _affine(batch.trajectories["scores"], settings, _scopes(batch), weights)
    return mean, divisor, live & kept


def _scopes(batch: Batch) -> dict[str, np.ndarray]:
    """The label of every trajectory [N] under each grouping."""
    table = batch.trajectories
    everything = np.arange(len(table))
    group = table["traj_group_id"]
    return {
        "traj_group_id": group,
        "group": group,
        "batch": np.zeros(len(table), np.int64),
        "tags": table["tag"],
        "traj_id": everything,
    }


def _affine(
    values: np.ndarray, settings: RewardNormalization, scopes: dict[str, np.ndarray], weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """μ, divisor (never 0) and whether there is a signal, each [n]: the normalised value is (value − μ)/divisor, or 0
    without signal."""
    mean, divisor, live = np.zeros(len(values)), np.ones(len(values)), np.ones(len(values), np.bool_)
    mean_scope, std_scope = _chosen_scopes(settings)
    if mean_scope is not None:
        mean, _, live = _statistics(values, scopes[mean_scope], weights)
    if std_scope is not None:
        _, std, signal = _statistics(values, scopes[std_scope], weights)
        divisor, live = std + EPSILON, live & signal
    return mean, divisor, live


def _chosen_scopes(settings: RewardNormalization) -> tuple[str | None, str | None]:
    """The scope of μ and that of σ; None: it is not used."""
    if settings.norm_mean_type is not None or settings.norm_std_type is not None:
        return settings.norm_mean_type, settings.norm_std_type
    if settings.method == "identity":
        return None, None
    return settings.grouping, None if settings.method == "mean" else settings.grouping


def _statistics(
    values: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """μ, unbiased σ and (more than one member and σ > 1e-6) of each entry's scope, each [n]; `weights`: how often an
    entry counts."""
    scopes, where = np.unique(labels, return_inverse=True)
    counted = weights > 0
    # The least counted value of each scope; a scope without any has 0.
    base = np.full(len(scopes), np.inf)
    np.minimum.at(base, where[counted], values[counted])
    base[np.isinf(base)] = 0.0
    # Equal values, however large, have σ = 0 exactly.
    shifted = values - base[where]
    members = np.bincount(where, weights=weights, minlength=len(scopes))
    mean = np.bincount(where, weights=weights * shifted, minlength=len(scopes)) / np.maximum(members, 1.0)
    squares = np.bincount(where, weights=weights * (shifted - mean[where]) ** 2, minlength=len(scopes))
    std = np.sqrt(squares / np.maximum(members - 1.0, 1.0))
    live = (members > 1) & (std > EPSILON)
    return (base + mean)[where], std[where], live[where]
