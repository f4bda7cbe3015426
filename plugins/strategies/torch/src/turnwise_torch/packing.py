"""Several samples in one row that do not see each other: where each begins, and the attention mask that says so."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

DENSE = ("sdpa", "eager")
"""Attention that takes a mask of all pairs of positions."""


@frozen(eq=False)
class Packing:
    """Which tokens of packed rows [b, w] belong together.

    `position_ids` int64 [b, w]: of every token in its own sample. `segments` int64 [b, w]: the number of its sample in
    the row; padding counts as one more, so that no row of the attention is empty.
    """

    position_ids: Tensor
    segments: Tensor


def varlen(attn_implementation: str) -> bool:
    """Whether the attention computes within samples alone (flash attention's varlen) instead of masking the rest of the
    row."""
    return attn_implementation.startswith("flash_attention")


def packed_mask(packing: Packing, attn_implementation: str, dtype: torch.dtype) -> Tensor:
    """[b, 1, w, w]: causal within each sample. bool (True: attend), or for eager attention what is added to its scores,
    in `dtype`."""
    segments = packing.segments
    mask = (segments[:, :, None] == segments[:, None, :]).tril()[:, None]
    if attn_implementation != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
