"""Log-probs, entropies and values of response tokens from a stage's last hidden states, over a vocabulary and a
sequence that ranks share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import frozen
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from turnwise_megatron.model import Model, context_positions
from turnwise_megatron.parallel import Parallel
from turnwise_torch.head import LOGITS_AT_A_TIME
from turnwise_torch.microbatch import MicroBatch

NEVER = torch.finfo(torch.float32).min
"""The logit of a token that pads the vocabulary."""


@frozen(eq=False)
class Share:
    """What a context parallel rank computes of a micro-batch of b rows with r response tokens.

    `input_ids` int64 [b, n]: its positions. `rows`, `columns` int64 [m]: where in them response tokens are predicted.
    `targets` int64 [m]. `responses` int64 [m]: which of the r they are.
    """

    input_ids: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor
    responses: Tensor
    count: int


def share_of(batch: MicroBatch, parallel: Parallel, sequence_parallel: bool) -> Share:
    """The rank's part of a micro-batch, its width padded so that context and sequence parallel ranks get equal
    parts."""
    size, ids = parallel.sizes["context"], batch.input_ids
    # Twice the context parallel size: each rank has a chunk from the front and one from the end (context_positions).
    multiple = (2 * size if size > 1 else 1) * (parallel.sizes["tensor"] if sequence_parallel else 1)
    width = ids.shape[1]
    rows, positions = batch.predictors // width, batch.predictors % width
    ids = F.pad(ids, (0, -width % multiple))
    if size == 1:
        return Share(ids, rows, positions, batch.targets, torch.arange(len(rows), device=ids.device), len(rows))
    mine = context_positions(ids.shape[1], size, parallel.context).to(ids.device)
    column = torch.full((ids.shape[1],), -1, device=ids.device)
    column[mine] = torch.arange(len(mine), device=ids.device)
    here = (column[positions] >= 0).nonzero().squeeze(-1)
    return Share(ids[:, mine].contiguous(), rows[here], column[positions[here]], batch.targets[here], here, len(rows))


def token_log_probs(
    model: Model,
    hidden: Tensor,
    share: Share,
    parallel: Parallel,
    temperature: float,
    chunk: int,
    entropy: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """log_softmax(logits / temperature) of the r response tokens [r] and, if asked for, the entropies [r]; float32, on
    every rank of the tensor and context parallel groups. `hidden` [s, b, h] is what the last stage gave."""
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=parallel.tensor_group
        )
    else:
        # Forward it is the identity; backward it adds up the gradients of the vocabulary's parts.
        hidden = copy_to_tensor_model_parallel_region(hidden, group=parallel.tensor_group)
    picked, weight = hidden[share.columns, share.rows], model.output_weight()
    size = chunk or max(1, LOGITS_AT_A_TIME // len(weight))
    padding = parallel.tensor * len(weight) + torch.arange(len(weight), device=weight.device) >= model.vocabulary
    options = (
        temperature,
        padding if bool(padding.any()) else None,
        entropy,
        entropy_gradient and torch.is_grad_enabled(),
    )
    parts = []
    for part, targets in zip(picked.split(size), share.targets.split(size)):
        if len(picked) <= size or not torch.is_grad_enabled():
            parts.append(_log_probs(part, weight, targets, *options))
        else:
            parts.append(
                checkpoint(_log_probs, part, weight, targets, *options, use_reentrant=False, preserve_rng_state=False)
            )
    log_probs = _whole(torch.cat([part[0] for part in parts]), share, parallel)
    if not entropy:
        return log_probs, None
    return log_probs, _whole(torch.cat([part[1] for part in parts if part[1] is not None]), share, parallel)


def token_values(model: Model, hidden: Tensor, share: Share, parallel: Parallel) -> Tensor:
    """float32 [r]: the value of the prefix before every response token, on every rank."""
    # Each rank computes the same values, so each keeps its own part of the gradient.
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=parallel.tensor_group
        )
    values = model.value_head(hidden[share.columns, share.rows]).squeeze(-1).float()
    return _whole(values, share, parallel)


def _log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    padding: Tensor | None,
    entropy: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    logits = F.linear(hidden, weight).float() / temperature
    if padding is not None:
        logits = logits.masked_fill(padding, NEVER)
    spread = None
    if entropy:
        spread = _Entropy.apply(logits if entropy_gradient else logits.detach())
    # Megatron's cross entropy works in the memory of its argument, which the entropy's gradient still needs.
    given = logits.clone() if entropy_gradient else logits
    return -vocab_parallel_cross_entropy(given, targets), spread


class _Entropy(torch.autograd.Function):
    """−Σ p·log p of each row [m] of logits [m, vocabulary / tensor parallel size]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        """[m], on every tensor parallel rank."""
        group = get_tensor_model_parallel_group()
        largest = logits.amax(-1)
        # The largest logit over all parts is subtracted everywhere, or their sums of exponentials would not add up.
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        probabilities = shifted.exp()
        total = probabilities.sum(-1)
        dist.all_reduce(total, group=group)
        probabilities /= total[:, None]
        mean = (probabilities * shifted).sum(-1)
        dist.all_reduce(mean, group=group)
        ctx.save_for_backward(probabilities, shifted.sub_(mean[:, None]))
        # log p = shifted − log total: so no logarithm is taken of a probability that may be 0.
        return total.log() - mean

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """That of this rank's part of the logits."""
        probabilities, distance = ctx.saved_tensors
        return -gradient[:, None] * probabilities * distance


def _whole(values: Tensor, share: Share, parallel: Parallel) -> Tensor:
    """All r values on every context parallel rank. Each then computes the same objective, and its gradient reaches its
    own values alone."""
    if parallel.sizes["context"] == 1:
        return values
    here = values.new_zeros(share.count).index_copy(0, share.responses, values)
    return reduce_from_tensor_model_parallel_region(here, group=parallel.context_group)
