"""Arithmetic over the runs of a flat array, for estimators: sums, means, discounted returns and whitening without a
loop over entries.

Estimators work along `batch.sampled`: the sampled tokens in (trajectory, turn, position) order, so that what belongs
together is one contiguous run, whatever rows the trajectories were cut into.
"""

from __future__ import annotations

import numpy as np

from turnwise.data.batch import Batch


def run_starts(labels: np.ndarray) -> np.ndarray:
    """int64 [G]: where each run of equal neighbours in `labels` [R] begins (for np.add.reduceat: no run is empty)."""
    labels = np.asarray(labels)
    if not len(labels):
        return np.zeros(0, np.int64)
    return np.concatenate([[0], np.flatnonzero(labels[1:] != labels[:-1]) + 1]).astype(np.int64)


def run_ends(labels: np.ndarray) -> np.ndarray:
    """int64 [G]: one past the last entry of each run of equal neighbours in `labels` [R]."""
    # Without entries there is no run, so the end that is appended goes again.
    return np.append(run_starts(labels)[1:], np.int64(len(labels)))[: len(labels)]


def segment_sums(values: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """float64 [count]: the sum of `values` [R] under each label 0…count−1 of `labels` int [R], in any order; 0 where a
    label has none."""
    return np.bincount(np.asarray(labels, np.int64), weights=np.asarray(values, np.float64), minlength=count)[
        :count
    ].astype(np.float64)


def segment_means(values: np.ndarray, labels: np.ndarray, count: int, empty: float = 0.0) -> np.ndarray:
    """float64 [count]: the mean of `values` under each label; `empty` where a label has none."""
    members = np.bincount(np.asarray(labels, np.int64), minlength=count)[:count]
    # np.where computes both sides, so nothing may be divided by zero.
    return np.where(members > 0, segment_sums(values, labels, count) / np.maximum(members, 1), empty)


def discounted_sums(values: np.ndarray, labels: np.ndarray, gamma: float) -> np.ndarray:
    """float64 [R]: G_t = values_t + γ·G_{t+1} within each run of equal neighbours in `labels` [R]; G is 0 after a run's
    last entry.

    γ in [0, 1], else ValueError. By doubling: after j rounds every entry holds its own sum over 2^j entries, so a run
    of L entries takes log2(L) vectorised rounds, no power of γ is ever divided by, and an entry's result depends on its
    own run alone.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma!r}")
    total = np.array(values, np.float64)
    ends = run_ends(labels)
    # Entries after each one in its run.
    following = np.repeat(ends, ends - run_starts(labels)) - np.arange(len(total)) - 1
    longest = int(following.max(initial=0))
    reach, factor = 1, float(gamma)
    # A factor that underflows to 0 adds nothing any more.
    while reach <= longest and factor > 0.0:
        here = np.flatnonzero(following >= reach)
        total[here] += factor * total[here + reach]
        reach, factor = 2 * reach, factor * factor
    return total


def whiten(values: np.ndarray) -> np.ndarray:
    """float64 [R]: (x − μ)/sqrt(var + 1e-8) with the unbiased variance; fewer than two values are returned as they
    are."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return values.copy()
    shifted = values - values[0]  # equal values, however large, give exactly 0
    centred = shifted - shifted.mean()
    return centred / np.sqrt((centred**2).sum() / (len(values) - 1) + 1e-8)


def trains(batch: Batch) -> np.ndarray:
    """bool [N]: which trajectories train. False only where a group filter said so (trajectory column `trains`)."""
    if "trains" in batch.trajectories:
        return np.asarray(batch.trajectories["trains"], np.bool_)
    return np.ones(len(batch.trajectories), np.bool_)


def last_sampled(batch: Batch) -> np.ndarray:
    """int64 [N]: the token index of each trajectory's last sampled token, −1 where it has none."""
    last = np.full(len(batch.trajectories), -1, np.int64)
    owner = batch.tokens["trajectory"][batch.sampled]
    ends = run_ends(owner) - 1
    last[owner[ends]] = batch.sampled[ends]
    return last


def sampled_to_tokens(batch: Batch, values: np.ndarray) -> np.ndarray:
    """float64 [T]: `values` [R] put on the tokens `batch.sampled`; 0 on all other tokens and on trajectories that do
    not train."""
    out = np.zeros(len(batch.tokens), np.float64)
    out[batch.sampled] = np.where(trains(batch)[batch.tokens["trajectory"][batch.sampled]], values, 0.0)
    return out


def trajectories_to_tokens(batch: Batch, values: np.ndarray) -> np.ndarray:
    """float64 [T]: each trajectory's value of `values` [N] on all of its sampled tokens, in every row cut from it; 0
    elsewhere."""
    return sampled_to_tokens(batch, np.asarray(values, np.float64)[batch.tokens["trajectory"][batch.sampled]])


def turns_to_tokens(batch: Batch, values: np.ndarray) -> np.ndarray:
    """float64 [T]: each turn's value of `values` [K] on that turn's sampled tokens; 0 elsewhere."""
    return sampled_to_tokens(batch, np.asarray(values, np.float64)[batch.tokens["turn"][batch.sampled]])
