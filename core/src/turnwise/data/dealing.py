"""Rows dealt to data parallel ranks, balanced by tokens, and the ranks' answers put together again."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from turnwise.data.rows import Rows, UpdateResult, ranges


def deal(rows: Rows, parts: int) -> list[np.ndarray]:
    """Sample indices int64 of each of `parts` ranks, ascending; every sample once, some parts may be empty.

    Longest first to the rank with the fewest tokens (Graham 1969), so that no two ranks are further apart than the
    longest sample.
    """
    if parts < 1:
        raise ValueError(f"rows are dealt to at least one rank, got {parts}")
    lengths = rows.lengths
    loads = [(0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for sample in np.argsort(-lengths, kind="stable").tolist():
        load, part = heapq.heappop(loads)
        shares[part].append(sample)
        heapq.heappush(loads, (load + int(lengths[sample]), part))
    # Ascending, so that a rank's rows do not depend on the order in which they were dealt.
    return [np.array(sorted(share), np.int64) for share in shares]


def gather(rows: Rows, shares: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> np.ndarray:
    """[R, …]: `values[i]` over the sampled tokens of `rows.select(shares[i])`, as one array over those of `rows`."""
    responses = np.cumsum(np.concatenate([[0], rows.response_mask]))[rows.offsets].astype(np.int64)
    out = np.zeros((int(responses[-1]), *values[0].shape[1:]), values[0].dtype)
    for share, part in zip(shares, values, strict=True):
        out[ranges(responses[share], np.diff(responses)[share])] = part
    return out


def merge_results(results: Sequence[UpdateResult]) -> UpdateResult:
    """One result of the data parallel ranks': losses and sums add up, the gradient norm is already that of all."""
    sums: dict[str, tuple[float, float]] = {}
    for result in results:
        for name, (x, w) in result.sums.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + x, before[1] + w)
    # All ranks skip where one does, so any of them says so for all.
    skipped = any(result.skipped for result in results)
    return UpdateResult(
        loss=sum(result.loss for result in results), grad_norm=results[0].grad_norm, sums=sums, skipped=skipped
    )
