"""Segments: the sampled tokens of one turn, which always lie in one row and so in one micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.contracts.loss import LossView
from turnwise.data.numbers import LOG_RATIO_BOUND

ROUNDING = 1e-6
"""A ratio that far beyond a bound is on it: on-policy ratios are 1 up to rounding, and a bound of 1 clips none of them."""


def segments_of(view: LossView, level: str = "segment") -> Tensor:
    """int64 [R]: dense numbers from 0, equal on the tokens of one (trajectory, turn), or with level `sample` of one
    row."""
    labels = view.sample if level == "sample" else torch.stack([view.trajectory, view.turn])
    # Dense, because the means count with bincount, which has a slot for every number up to the largest.
    return torch.unique(labels, dim=-1, return_inverse=True)[1]


def segment_means(values: Tensor, segment: Tensor) -> Tensor:
    """[R]: on each token the mean of `values` [R] over its segment, with gradient."""
    count = torch.bincount(segment)
    total = torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add(0, segment, values)
    return (total / count)[segment]


def token_log_ratio(view: LossView) -> Tensor:
    """[R]: d = log_probs − old_log_probs per token, clamped to ±20, whatever `ratio_type` says."""
    return (view.log_probs - view.old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
