"""Micro-batches of rows as right-padded tensors, with the positions that predict the response tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from turnwise.data import microbatches
from turnwise.data.rows import Rows, ranges


@frozen(eq=False)
class MicroBatch:
    """b samples padded on the right to width w, with r response tokens.

    `input_ids` int64 [b, w], without the tokens from the last sampled one on: nothing is predicted from them. `predictors` int64 [r]: indices
    into the flat b·w positions whose hidden state predicts a response token. `targets` int64 [r]: those tokens. `responses` int64 [r]
    (numpy): where they stand among the R response tokens of the rows.
    """

    input_ids: Tensor
    predictors: Tensor
    targets: Tensor
    responses: np.ndarray


@frozen(eq=False)
class Layout:
    """Where the response tokens of `rows` are: computed once, then cut into micro-batches."""

    rows: Rows
    first: np.ndarray = field(init=False)
    """int64 [S]: index of each sample's first response token among the R."""
    count: np.ndarray = field(init=False)
    """int64 [S]: response tokens of each sample."""
    position: np.ndarray = field(init=False)
    """int64 [R]: position of each response token in its sample."""
    needed: np.ndarray = field(init=False)
    """int64 [S]: input tokens that a forward pass needs: those before the sample's last response token."""

    def __attrs_post_init__(self) -> None:
        rows, mask = self.rows, self.rows.response_mask
        at = np.flatnonzero(mask)
        before = np.concatenate([[0], np.cumsum(mask)]).astype(np.int64)[rows.offsets]
        count = np.diff(before)
        position = at - np.repeat(rows.offsets[:-1], count)
        needed = np.zeros(len(rows), np.int64)
        some = count > 0
        needed[some] = position[before[1:][some] - 1]
        for name, value in {"first": before[:-1], "count": count, "position": position, "needed": needed}.items():
            object.__setattr__(self, name, value)

    def cut(self, rows: int, budget: int | None, wanted: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Sample indices of one micro-batch after the other: `rows` samples, or a `budget` of padded tokens.

        Samples without a response token are left out, and where `wanted` bool [R] is given those without a wanted one.
        """
        per_token = np.ones(len(self.position), bool) if wanted is None else wanted
        some = np.diff(np.concatenate([[0], np.cumsum(per_token)])[np.append(self.first, len(per_token))]) > 0
        kept = np.flatnonzero(some)
        for group in microbatches.cut(self.needed[kept], rows, budget):
            yield kept[group]

    def micro_batch(self, samples: np.ndarray, device: torch.device) -> MicroBatch:
        """The named samples as tensors on `device`."""
        needed, count = self.needed[samples], self.count[samples]
        width = int(needed.max())
        ids = np.zeros((len(samples), width), np.int64)
        ids[np.arange(width) < needed[:, None]] = self.rows.input_ids[ranges(self.rows.offsets[samples], needed)]
        responses = ranges(self.first[samples], count)
        row = np.repeat(np.arange(len(samples)), count)
        position = self.position[responses]
        targets = self.rows.input_ids[self.rows.offsets[samples][row] + position].astype(np.int64)
        return MicroBatch(
            input_ids=torch.from_numpy(ids).to(device),
            predictors=torch.from_numpy(row * width + position - 1).to(device),
            targets=torch.from_numpy(targets).to(device),
            responses=responses,
        )
