"""The chunked head: log-probs and entropy of response tokens, a chunk's logits at a time, recomputed in the backward
pass."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turnwise_torch.microbatch import MicroBatch
from turnwise_torch.models import ValueModel, hidden_states

# 256 MiB in float32.
LOGITS_AT_A_TIME = 2**26


def token_log_probs(
    model: nn.Module,
    batch: MicroBatch,
    temperature: float,
    *,
    chunk: int = 0,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log_softmax(logits / temperature) of the r response tokens [r], and the entropy of each token's distribution [r]
    or None.

    float32 (float64 for a float64 model). `model` is a transformers causal model; its head runs only on the positions
    that predict.
    """
    hidden = hidden_states(model, batch).flatten(0, 1).index_select(0, batch.predictors)
    head = model.get_output_embeddings()  # type: ignore[operator]
    return chunked_log_probs(
        hidden, head, batch.targets, temperature, chunk=chunk, entropy=entropy, entropy_gradient=entropy_gradient
    )


def token_values(model: ValueModel, batch: MicroBatch) -> Tensor:
    """[r]: the value of the prefix before each response token, float32 (float64 for a float64 model)."""
    hidden = hidden_states(model, batch).flatten(0, 1).index_select(0, batch.predictors)
    return _wide(model.value_head(hidden).squeeze(-1))


def chunked_log_probs(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: float,
    *,
    chunk: int = 0,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [n] of `targets` int64 [n] under `head(hidden)`, hidden [n, h], and the entropies [n] or None.

    No more than `chunk` tokens' logits exist at a time (0: as many as hold 2²⁶ logits): with several chunks the
    backward pass computes them again. Without entropies, on a GPU with cut-cross-entropy installed, none exist
    (`fused_head`). Entropies carry a gradient only with `entropy_gradient`.
    """
    if not entropy and fused_head(hidden, head, temperature):
        from cut_cross_entropy import linear_cross_entropy

        # filter_eps None: no part of the gradient is left out.
        return -linear_cross_entropy(hidden, head.weight, targets, reduction="none", filter_eps=None).float(), None
    size = chunk or max(1, LOGITS_AT_A_TIME // int(head.out_features))  # type: ignore[arg-type]
    options = (temperature, entropy, entropy_gradient)
    # One chunk's logits fit, and need not be computed twice.
    if len(targets) <= size or not torch.is_grad_enabled():
        parts = [_log_probs(h, head, t, *options) for h, t in zip(hidden.split(size), targets.split(size))]
    else:
        parts = [
            checkpoint(_log_probs, h, head, t, *options, use_reentrant=False, preserve_rng_state=False)
            for h, t in zip(hidden.split(size), targets.split(size))
        ]
    log_probs = torch.cat([part[0] for part in parts])
    return log_probs, torch.cat([part[1] for part in parts if part[1] is not None]) if entropy else None


def fused_head(hidden: Tensor, head: nn.Module, temperature: float) -> bool:
    """Whether cut-cross-entropy (Wijmans et al. 2024, arXiv 2411.09009) gives the log-probs, without any logits in
    memory: on a GPU with 16-bit weights, where the package is installed. It takes logits as they are, so at temperature
    1 only: hidden states divided in 16 bits would round otherwise than logits divided in 32."""
    sixteen = hidden.dtype in (torch.bfloat16, torch.float16) and hidden.is_cuda
    # ZeRO-3 leaves a parameter of no elements wherever its own hooks have not gathered it.
    whole = head.weight.numel() == head.out_features * head.in_features  # type: ignore[operator,union-attr]
    plain = temperature == 1 and whole and getattr(head, "bias", None) is None
    return bool(sixteen and plain) and importlib.util.find_spec("cut_cross_entropy") is not None


def _log_probs(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float, entropy: bool, entropy_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    # Widened first: divided in 16 bits, logits would be rounded a second time.
    logits = _wide(head(hidden)) / temperature
    normaliser = logits.logsumexp(-1)
    log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    if not entropy:
        return log_probs, None
    # As a metric alone it needs no graph, which would keep a second tensor as large as the logits.
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        every = logits - normaliser[:, None]
        return log_probs, -(every.exp() * every).sum(-1)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
