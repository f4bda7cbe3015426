"""Micro-batches through Megatron's schedules: forward alone for log-probs and values, forward and backward for an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from turnwise_megatron.logprobs import Share, share_of
from turnwise_megatron.parallel import Parallel
from turnwise_torch.microbatch import MicroBatch

Work = Callable[[Tensor, Share, MicroBatch], tuple[Tensor, Any]]
"""(last hidden states, the rank's share, the micro-batch) → (loss, what the caller wants to know of it); runs on the last stage."""


def run(
    model: nn.Module, parallel: Parallel, batches: Iterator[MicroBatch], count: int, work: Work, sequence_parallel: bool, train: bool
) -> list[Any]:
    """What `work` told of each of the `count` micro-batches, on every rank of the pipeline; with `train` gradients of the losses' sum."""

    def step(iterator: Iterator[MicroBatch], stage: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(iterator)
        share = share_of(batch, parallel, sequence_parallel)
        hidden = stage(input_ids=share.input_ids, position_ids=None, attention_mask=None)

        def told(output: Tensor, non_loss_data: bool = False) -> Any:
            loss, answer = work(output, share, batch)
            return answer if non_loss_data else (loss, torch.zeros((), dtype=torch.int, device=loss.device), answer)

        return hidden, told

    answers = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=batches,
        model=[model],
        num_microbatches=count,
        seq_length=1,  # without effect: one process knows the shapes, and pipelines exchange them (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=not train,
        collect_non_loss_data=not train,
    )
    return told_to_all(answers, parallel)


def told_to_all(answers: Any, parallel: Parallel) -> Any:
    """The last stage's `answers`, on every rank of its pipeline."""
    if len(parallel.pipeline_ranks) == 1:
        return answers
    held = [answers]
    dist.broadcast_object_list(held, parallel.pipeline_ranks[-1], group=parallel.pipeline_group)
    return held[0]
