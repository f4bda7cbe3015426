"""Aggregation: what each token's loss is multiplied with, so that Σ coef·loss over an optimizer step is the
objective."""

from __future__ import annotations

import numpy as np

from turnwise.errors import ConfigError, did_you_mean, listed

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
UNITS = ("trajectory", "sample")


def token_coefficients(
    mode: str,
    unit: str,
    row_ids: np.ndarray,
    trajectory: np.ndarray,
    weights: np.ndarray,
    lengths: np.ndarray,
    scale: float = 1.0,
) -> np.ndarray:
    """float64 [n]: the coefficient that every sampled token of a row carries, for the n rows of **one optimizer step**
    over all ranks.

    `row_ids` int64 [n] (copies of a row share one), `trajectory` int64 [n], `weights` float64 [n], `lengths` int64 [n]:
    sampled tokens of the row, before any filter. `scale`: C of `seq-mean-token-sum-norm` (`loss_scale_factor`),
    positive. Zero everywhere if no row has a sampled token. Raises ConfigError for an unknown mode or unit or a scale
    that is not positive.

    A unit u is a trajectory's rows, or one row with its copies. S_u = Σ w·Σ loss, N_u = Σ w·length, W_u = the largest
    weight of a distinct row of u, its copies summed (0 if N_u = 0). The modes are ΣS/ΣN, ΣW(S/N)/ΣW, ΣS/ΣW and
    ΣS/(C·ΣW).
    """
    _check(mode, unit, scale)
    weights = np.asarray(weights, np.float64)
    tokens = weights * np.asarray(lengths, np.float64)
    if not tokens.sum() > 0:
        return np.zeros(len(weights))
    if mode == "token-mean":
        return np.asarray(weights / tokens.sum())

    # Copies of a row are one row, of their summed weight.
    rows, first, row = np.unique(row_ids, return_index=True, return_inverse=True)
    row_weight = np.bincount(row, weights=weights, minlength=len(rows))
    units, unit_of_row = np.unique(np.asarray(trajectory)[first] if unit == "trajectory" else rows, return_inverse=True)
    unit_tokens = np.bincount(unit_of_row[row], weights=tokens, minlength=len(units))
    unit_weight = np.zeros(len(units))
    # The largest, not the sum: a trajectory counts once, into however many rows it was cut.
    np.maximum.at(unit_weight, unit_of_row, row_weight)
    # Rows without sampled tokens are no sequence.
    unit_weight[unit_tokens == 0] = 0.0

    # seq-mean-token-sum; the other two modes divide it further.
    per_unit = np.full(len(units), 1.0 / unit_weight.sum())
    if mode == "seq-mean-token-mean":
        per_unit *= unit_weight / np.where(unit_tokens > 0, unit_tokens, 1.0)
    if mode == "seq-mean-token-sum-norm":
        per_unit /= scale
    return np.asarray(weights * per_unit[unit_of_row[row]])


def _check(mode: str, unit: str, scale: float) -> None:
    if mode not in MODES:
        raise ConfigError(
            f"loss_agg_mode: {mode!r} is unknown.{did_you_mean(mode, MODES)} Known: {listed(MODES)}. Fix: one of them"
        )
    if unit not in UNITS:
        raise ConfigError(
            f"loss_agg_unit: {unit!r} is unknown.{did_you_mean(unit, UNITS)} Known: {listed(UNITS)}. Fix: one of them"
        )
    if mode == "seq-mean-token-sum-norm" and not scale > 0:
        raise ConfigError(f"loss_scale_factor: {scale!r} is not a positive number. Fix: such as sequence_length")
