"""Micro-batches of rows as right-padded or packed tensors, with the positions that predict the response tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from turnwise.data import microbatches
from turnwise.data.rows import Rows, ranges
from turnwise_torch.packing import Packing
from turnwise_torch.vision import Pixels


@frozen(eq=False)
class MicroBatch:
    """b rows padded on the right to width w, with r response tokens; `packing` where a row holds several samples.

    `input_ids` int64 [b, w], without the tokens from the last sampled one on: nothing is predicted from them.
    `predictors` int64 [r]: indices into the flat b·w positions whose hidden state predicts a response token. `targets`
    int64 [r]: those tokens. `responses` int64 [r] (numpy): where they stand among the R response tokens of the rows.
    `pixels`: the images in the rows, in their order, which stand where `image_mask` bool [b, w]; `beside`: images of no
    row, which a rank without any runs through the vision tower where others run theirs.
    """

    input_ids: Tensor
    predictors: Tensor
    targets: Tensor
    responses: np.ndarray
    packing: Packing | None = None
    pixels: Pixels | None = None
    image_mask: Tensor | None = None
    beside: Pixels | None = None


def plain(input_ids: Tensor) -> MicroBatch:
    """Rows [b, w] of text from which nothing is predicted."""
    none = torch.zeros(0, dtype=torch.int64, device=input_ids.device)
    return MicroBatch(input_ids, none, none, np.zeros(0, np.int64))


def padding(device: torch.device) -> MicroBatch:
    """One response token after one token: what a rank computes, at coefficient zero, while others still have rows."""
    one = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(input_ids=one[None], predictors=one, targets=one, responses=np.zeros(1, np.int64))


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
        # Response tokens before each boundary between rows: neighbours differ by a row's count.
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
        kept = self._kept(wanted)
        for group in microbatches.cut(self.needed[kept], rows, budget):
            yield kept[group]

    def pack(self, budget: int, wanted: np.ndarray | None = None, one_row: bool = False) -> Iterator[list[np.ndarray]]:
        """The rows of one micro-batch after the other, each the indices of the samples in it; see
        turnwise.data.microbatches.packed."""
        kept = self._kept(wanted)
        for group in microbatches.packed(self.needed[kept], budget, one_row):
            yield [kept[row] for row in group]

    def micro_batch(self, samples: np.ndarray, device: torch.device) -> MicroBatch:
        """The named samples as tensors on `device`, each in a row of its own."""
        return self.packed_batch([samples[i : i + 1] for i in range(len(samples))], device)

    def packed_batch(self, rows: Sequence[np.ndarray], device: torch.device) -> MicroBatch:
        """The samples of every row, one after the other, as tensors on `device`."""
        samples, sizes = np.concatenate(rows), np.array([len(row) for row in rows])
        needed, count = self.needed[samples], self.count[samples]
        fill = np.add.reduceat(needed, np.cumsum(sizes) - sizes)
        width = int(fill.max())
        row = np.repeat(np.arange(len(rows)), sizes)
        # Where each sample begins among the flat b·w positions.
        at = row * width + np.cumsum(needed) - needed - np.repeat(np.cumsum(fill) - fill, sizes)
        # Padding has the id 0, a token like any other: it stands to the right, where causal attention hides it.
        ids = np.zeros(len(rows) * width, np.int64)
        ids[ranges(at, needed)] = self.rows.input_ids[ranges(self.rows.offsets[samples], needed)]
        responses = ranges(self.first[samples], count)
        position = self.position[responses]
        targets = self.rows.input_ids[np.repeat(self.rows.offsets[samples], count) + position].astype(np.int64)
        return MicroBatch(
            input_ids=torch.from_numpy(ids.reshape(len(rows), width)).to(device),
            # The hidden state at one position predicts the token at the next.
            predictors=torch.from_numpy(np.repeat(at, count) + position - 1).to(device),
            targets=torch.from_numpy(targets).to(device),
            responses=responses,
            # With one sample in every row causal attention alone is right, and no mask has to be built.
            packing=_packing(sizes, needed, fill, device) if len(samples) > len(rows) else None,
        )

    def _kept(self, wanted: np.ndarray | None) -> np.ndarray:
        """Samples with a wanted response token."""
        per_token = np.ones(len(self.position), bool) if wanted is None else wanted
        return np.flatnonzero(
            np.diff(np.concatenate([[0], np.cumsum(per_token)])[np.append(self.first, len(per_token))]) > 0
        )


def _packing(sizes: np.ndarray, needed: np.ndarray, fill: np.ndarray, device: torch.device) -> Packing:
    """`sizes` [b]: samples of each row; `needed`: tokens of each sample; `fill` [b]: their sum in each row."""
    ends = np.cumsum(sizes)
    # The padding of a row stands behind its last sample.
    lengths = np.insert(needed, ends, fill.max() - fill)
    segments = np.repeat(ranges(np.zeros(len(sizes), np.int64), sizes + 1), lengths)
    positions = ranges(np.zeros(len(lengths), np.int64), lengths)
    position_ids, numbers = (torch.from_numpy(x.reshape(len(sizes), -1)).to(device) for x in (positions, segments))
    return Packing(position_ids, numbers)
