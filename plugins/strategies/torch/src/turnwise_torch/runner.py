"""How the micro-batches of a pass go through the model: one after the other here, by schedules of their own
elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

from torch import Tensor

from turnwise_torch.microbatch import MicroBatch
from turnwise_torch.objective import Sums
from turnwise_torch.ranks import ProcessGroup

Answer = tuple[Tensor, Sums]
"""Of a micro-batch of an update its loss and metric sums; of one of an inference the values [r] of its response tokens, on the CPU."""
Work = Callable[[MicroBatch], Answer]


class Runner(Protocol):
    """What a strategy gives ModelStrategy to compute micro-batches with."""

    def count(self, own: int, train: bool) -> int:
        """How many micro-batches a rank with `own` of its own computes, for collectives inside the model must meet
        those of other ranks."""
        ...

    def run(self, batches: Iterator[MicroBatch], count: int, work: Work, train: bool) -> list[Answer]:
        """`work` on the first `count` batches, in order; with `train` the gradients of its losses are added up as
        well."""
        ...


class OneByOne:
    """Forward and, in an update, backward of one micro-batch before the next; all ranks compute as many as the rank
    with the most.

    `backward(loss, last)` adds a micro-batch's gradient; `last`: no further one follows, so that ranks may exchange
    theirs."""

    def __init__(self, group: ProcessGroup, backward: Callable[[Tensor, bool], None]) -> None:
        self._group, self._backward = group, backward

    def count(self, own: int, train: bool) -> int:
        """The most of any rank."""
        return self._group.largest(own)[0]

    def run(self, batches: Iterator[MicroBatch], count: int, work: Work, train: bool) -> list[Answer]:
        """As Runner.run."""
        answers = []
        for number, batch in enumerate(islice(batches, count), 1):
            value, sums = work(batch)
            if train:
                self._backward(value, number == count)
            # A kept graph would keep the activations of every micro-batch.
            answers.append((value.detach(), sums))
        return answers
