"""What can be known of a training role before its model is loaded: one line per problem, `machine: …` for what only this machine lacks."""

from __future__ import annotations

import importlib.util

from turnwise.contracts.train import TrainContext
from turnwise_torch import lora
from turnwise_torch.objective import kl_estimator
from turnwise_torch.packing import DENSE, varlen


def role_problems(context: TrainContext, strategy: str) -> list[str]:
    """Of any strategy that minimises turnwise_torch's objective; `strategy` is its name."""
    role, problems = context.role, []
    if context.trainable and context.dtype == "fp16":
        problems.append(f"{role}.model_args.dtype: fp16 cannot be trained by strategy {strategy}, which scales no losses. Fix: bf16 or fp32")
    if context.temperature <= 0:
        problems.append(f"{role} needs a sampling temperature over 0 (log-probs are of logits / temperature), got {context.temperature}")
    if context.trainable and context.objective is None:
        problems.append(f"{role} is trainable but has no objective")
    elif context.objective is not None:
        try:
            kl_estimator(context.objective.kl_loss_type)
        except ValueError as error:
            problems.append(f"kl_loss_type: {error}")
    return problems


def model_problems(context: TrainContext, strategy: str) -> list[str]:
    """Of a strategy that runs a transformers model: `role_problems`, and its adapters, attention and packing."""
    role, attention, problems = context.role, context.attn_implementation, [*lora.problems(context), *role_problems(context, strategy)]
    if attention.startswith("flash_attention"):
        if importlib.util.find_spec("flash_attn") is None:
            problems.append(f"machine: {role}.model_args.attn_implementation: {attention} needs the package flash_attn. Fix: sdpa")
        if context.dtype == "fp32":
            problems.append(f"{role}.model_args.attn_implementation: {attention} needs dtype bf16 or fp16. Fix: sdpa")
    if context.use_sequence_packing:
        if not varlen(attention) and attention not in DENSE:
            problems.append(
                f"{role}.use_sequence_packing: {attention} is not packed by strategy {strategy}. "
                f"Fix: model_args.attn_implementation: sdpa, or use_sequence_packing: false"
            )
        if None in (context.max_tokens_per_microbatch_in_train, context.max_tokens_per_microbatch_in_infer):
            problems.append(f"{role}.use_sequence_packing needs both token budgets")
    return problems
