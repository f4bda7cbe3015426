"""Micro-batches one after the other: their order, the padding of ranks with fewer, what is kept of each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import torch

from turnwise.contracts.train import Ranks
from turnwise_torch.microbatch import MicroBatch, padding
from turnwise_torch.ranks import ProcessGroup
from turnwise_torch.runner import Answer, OneByOne

CPU = torch.device("cpu")


class WithAnotherRank(ProcessGroup):
    """This rank, beside one that has five of whatever is compared."""

    def __init__(self) -> None:
        super().__init__(Ranks(), CPU, 1.0)

    def largest(self, *numbers: int) -> list[int]:
        """Of both."""
        return [max(number, 5) for number in numbers]


def work(batch: MicroBatch) -> Answer:
    value = torch.tensor(2.0, requires_grad=True) * 3
    return value, {"x": (value.detach(), torch.ones(()))}


def test_every_rank_computes_as_many_micro_batches_as_the_rank_with_the_most() -> None:
    runner = OneByOne(WithAnotherRank(), lambda loss, last: None)
    assert [runner.count(own, train) for own in (0, 3, 7) for train in (True, False)] == [5, 5, 5, 5, 7, 7]


def test_gradients_are_added_in_order_and_the_last_one_is_named() -> None:
    seen: list[tuple[bool, bool]] = []
    runner = OneByOne(WithAnotherRank(), lambda loss, last: seen.append((loss.requires_grad, last)))
    answers = runner.run(repeat(padding(CPU)), 3, work, train=True)
    assert seen == [(True, False), (True, False), (True, True)]
    assert [value.requires_grad for value, _ in answers] == [False] * 3
    assert [sums["x"] for _, sums in answers] == [(6.0, 1.0)] * 3


def test_an_inference_has_no_backward_and_makes_no_batch_that_it_does_not_need() -> None:
    made: list[int] = []

    def batches() -> Iterator[MicroBatch]:
        while True:
            made.append(len(made))
            yield padding(CPU)

    def backward(loss: torch.Tensor, last: bool) -> None:
        raise AssertionError("backward in an inference")

    assert len(OneByOne(WithAnotherRank(), backward).run(batches(), 2, work, train=False)) == 2
    assert made == [0, 1]
