"""One pass over rows, cut by a Feed and computed by a Runner: the gradient of an update, or a value for every sampled
token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from turnwise.data.rows import Rows, Update
from turnwise_torch.feed import Feed
from turnwise_torch.microbatch import Layout, MicroBatch
from turnwise_torch.runner import Answer, Runner

Terms = Callable[[MicroBatch, Mapping[str, np.ndarray]], Answer]
"""The objective's part of a micro-batch, from the columns of all response tokens."""


def accumulate(
    feed: Feed, runner: Runner, update: Update, columns: Mapping[str, np.ndarray], terms: Terms
) -> tuple[float, dict[str, tuple[float, float]]]:
    """The gradient of the objective over all micro-batches; its value and the metric sums, of this rank's rows."""
    context, layout, filler = feed.context, Layout(update.rows), feed.filler()
    # A token that a filter has taken out has coef 0, and still counts in the metrics by its weight.
    wanted = (columns["coef"] != 0) | (columns["weight"] != 0)
    groups = feed.groups(
        layout, context.per_device_train_batch_size, context.max_tokens_per_microbatch_in_train, wanted
    )
    # The filler belongs to no row: its columns have to exist, and count nothing.
    zeros = {name: np.zeros((1, *column.shape[1:]), column.dtype) for name, column in columns.items()}

    def work(batch: MicroBatch) -> Answer:
        return terms(batch, zeros if batch is filler else columns)

    total = 0.0
    sums: dict[str, tuple[float, float]] = {}
    count = runner.count(len(groups), train=True)
    for loss, metrics in runner.run(feed.batches(layout, groups, filler), count, work, train=True):
        total += float(loss)
        for name, (x, w) in metrics.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + float(x), before[1] + float(w))
    return total, sums


@torch.no_grad()
def infer(feed: Feed, runner: Runner, rows: Rows, compute: Callable[[MicroBatch], Tensor]) -> np.ndarray:
    """float32 [R]: what `compute` makes of the response tokens of every micro-batch, in their order in `rows`."""
    context, layout, filler = feed.context, Layout(rows), feed.filler()
    groups = feed.groups(layout, context.infer_batch_size, context.max_tokens_per_microbatch_in_infer)
    places: list[np.ndarray] = []

    def batches() -> Iterator[MicroBatch]:
        for batch in feed.batches(layout, groups, filler):
            places.append(batch.responses)
            yield batch

    count = runner.count(len(groups), train=False)
    answers = runner.run(batches(), count, lambda batch: (compute(batch).float().cpu(), {}), train=False)
    out = np.zeros(len(layout.position), np.float32)
    # Fillers come last.
    for place, (values, _) in list(zip(places, answers, strict=True))[: len(groups)]:
        out[place] = values.numpy()
    return out
