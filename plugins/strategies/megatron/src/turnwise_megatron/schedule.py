"""Micro-batches through Megatron's schedules: forward alone for log-probs and values, forward and backward for an
update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from turnwise_megatron.logprobs import Share, share_of
from turnwise_megatron.parallel import Parallel
from turnwise_megatron.shim import cuda_or_cpu
from turnwise_torch.microbatch import MicroBatch
from turnwise_torch.ranks import ProcessGroup
from turnwise_torch.runner import Answer, Work


class Schedule:
    """The Runner (see turnwise_torch.runner) of this rank's stage. Work is done on the last stage, and all ranks of a
    pipeline get its answers."""

    def __init__(self, module: nn.Module, parallel: Parallel, group: ProcessGroup, sequence_parallel: bool) -> None:
        """`module`: the stage, wrapped where its gradients are kept."""
        self._module, self._parallel, self._group, self._sequence_parallel = module, parallel, group, sequence_parallel
        self._current: tuple[Tensor, Share] | None = None

    @property
    def current(self) -> tuple[Tensor, Share]:
        """The last hidden states of the micro-batch that is worked on, and this rank's share of it."""
        assert self._current is not None
        return self._current

    def count(self, own: int, train: bool) -> int:
        """Ranks that share experts compute equal numbers of micro-batches, for each serves the others. In an update a
        rank without rows computes one, for its part in the exchange of gradients."""
        # Expert parallel ranks may belong to different pipelines, so the role's whole group agrees on the number.
        together = self._group.largest(own)[0] if self._parallel.experts.size > 1 else own
        return max(1, together) if train else together

    def run(self, batches: Iterator[MicroBatch], count: int, work: Work, train: bool) -> list[Answer]:
        """As Runner.run."""

        def step(iterator: Iterator[MicroBatch], stage: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            """Megatron's forward step: the stage's hidden states, and what the last stage makes of them."""
            batch = next(iterator)
            share = share_of(batch, self._parallel, self._sequence_parallel)
            hidden = stage(input_ids=share.input_ids, position_ids=None, attention_mask=None)

            def worked(output: Tensor, non_loss_data: bool = False) -> Any:
                """(loss, count, answer) before a backward pass, the answer alone without one."""
                self._current = output, share
                value, sums = work(batch)
                # On the CPU: the answer is pickled for the other ranks, which have other devices.
                answer = (
                    value.detach().cpu(),
                    {name: (x.cpu(), w.cpu()) for name, (x, w) in sums.items()},
                )
                return (
                    # The number in the middle is Megatron's count of tokens: it sums it with calculate_per_token_loss,
                    # and `_finalize` of the optimizer leaves the division out.
                    answer if non_loss_data else (value, torch.zeros((), dtype=torch.int, device=value.device), answer)
                )

            return hidden, worked

        # Megatron's schedules take at least one micro-batch.
        if not count:
            return []
        try:
            with cuda_or_cpu():
                answers = get_forward_backward_func()(
                    forward_step_func=step,
                    data_iterator=batches,
                    model=[self._module],
                    num_microbatches=count,
                    # without effect: one process knows the shapes, and pipelines exchange them (variable_seq_lengths)
                    seq_length=1,
                    micro_batch_size=1,
                    forward_only=not train,
                    collect_non_loss_data=not train,
                )
                return _to_all(answers, self._parallel)
        finally:
            self._current = None  # the graph goes with it


def _to_all(answers: list[Answer], parallel: Parallel) -> list[Answer]:
    """The last stage's `answers`, on every rank of its pipeline."""
    if len(parallel.pipeline_ranks) == 1:
        return answers
    held = [answers]
    dist.broadcast_object_list(held, parallel.pipeline_ranks[-1], group=parallel.pipeline_group)
    return held[0]
