"""Rows cut into micro-batches on a device, with the images that belong to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import numpy as np
import torch
from attrs import evolve

from turnwise.contracts.train import TrainContext
from turnwise.data.rows import Rows
from turnwise.errors import ConfigError, TrainerError
from turnwise_torch.microbatch import Layout, MicroBatch, padding
from turnwise_torch.packing import varlen
from turnwise_torch.vision import Vision, has_vision

Group = list[np.ndarray]
"""The rows of a micro-batch, each the indices of the samples in it."""


class Feed:
    """The micro-batches of one process. Raises ConfigError: packing asked for with a vision-language model."""

    def __init__(self, context: TrainContext, device: torch.device) -> None:
        self.context, self.device = context, device
        self.vision = Vision(context.model) if has_vision(context.model) else None
        if self.vision is not None and context.use_sequence_packing:
            raise ConfigError(
                f"{context.role}.use_sequence_packing: a vision-language model is not packed. Fix:"
                " use_sequence_packing: false"
            )

    def check(self, rows: Rows, vocabulary: int) -> None:
        """Raises TrainerError: images for a model of text, or ids outside the vocabulary, which on a GPU end the
        process without a word."""
        if rows.images and self.vision is None:
            raise TrainerError(f"{self.context.role} received images, its model takes text alone")
        ids = rows.input_ids
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            worst = int(ids.max()) if ids.max() >= vocabulary else int(ids.min())
            raise TrainerError(
                f"{self.context.role} received the token id {worst}, its model has ids 0 to {vocabulary - 1}"
            )

    def groups(self, layout: Layout, rows: int, budget: int | None, wanted: np.ndarray | None = None) -> list[Group]:
        """Which samples each micro-batch holds: `rows` of them, or a `budget` of tokens; `wanted` as in Layout.cut."""
        if self.context.use_sequence_packing:
            assert budget is not None
            # transformers finds samples by their positions only in a batch of one row.
            return list(layout.pack(budget, wanted, one_row=varlen(self.context.attn_implementation)))
        return [[samples[i : i + 1] for i in range(len(samples))] for samples in layout.cut(rows, budget, wanted)]

    def batches(self, layout: Layout, groups: Sequence[Group], filler: MicroBatch) -> Iterator[MicroBatch]:
        """One micro-batch for each group, made when it is asked for, and then the filler without end."""
        return chain((self._batch(layout, group) for group in groups), repeat(filler))

    def filler(self) -> MicroBatch:
        """What a rank computes while others still have rows."""
        return self._beside(padding(self.device))

    def _batch(self, layout: Layout, group: Group) -> MicroBatch:
        batch = layout.packed_batch(group, self.device)
        if self.vision is None or not layout.rows.images:
            return self._beside(batch)
        images: list[np.ndarray] = []
        mask = np.zeros(tuple(batch.input_ids.shape), np.bool_)
        # One sample a row: nothing is packed.
        for place, sample in enumerate(np.concatenate(group)):
            row, length = layout.rows.select(np.array([sample])), layout.needed[sample]
            mask[place, :length], found = self.vision.find(row.input_ids[:length], row.images[0])
            images += found
        pixels = self.vision.pixels(images, self.device)
        return (
            self._beside(batch)
            if pixels is None
            else evolve(batch, pixels=pixels, image_mask=torch.from_numpy(mask).to(self.device))
        )

    def _beside(self, batch: MicroBatch) -> MicroBatch:
        """A micro-batch of text alone; where other ranks may run the vision tower this one does too, for their
        collectives must meet."""
        return (
            batch
            if self.vision is None or self.context.ranks.size == 1
            else evolve(batch, beside=self.vision.blank(self.device))
        )
