"""What can be known of a training role before its model is loaded."""

from __future__ import annotations

import importlib.util

from turnwise.contracts.train import TrainContext
from turnwise.errors import Problem
from turnwise_torch import lora
from turnwise_torch.objective import kl_estimator
from turnwise_torch.packing import DENSE, varlen


def role_problems(context: TrainContext, strategy: str) -> list[Problem]:
    """Of any strategy that minimises turnwise_torch's objective; `strategy` is its name."""
    role, problems = context.role, list[Problem]()
    if context.trainable and context.dtype == "fp16":
        problems.append(
            Problem(
                f"{role}.model_args.dtype",
                f"fp16 cannot be trained by strategy {strategy}, which scales no losses. Fix: bf16 or fp32",
            )
        )
    if context.temperature <= 0:
        problems.append(
            Problem(
                role,
                "needs a sampling temperature over 0 (log-probs are of logits / temperature), got"
                f" {context.temperature}. Fix: generating_args.temperature: 1",
            )
        )
    if context.trainable and context.objective is None:
        problems.append(Problem(role, "trainable, but it has no objective. Fix: build it with one"))
    elif context.objective is not None:
        try:
            kl_estimator(context.objective.kl_loss_type)
        except ValueError as error:
            problems.append(Problem("kl_loss_type", str(error)))
    return problems


def model_problems(context: TrainContext, strategy: str) -> list[Problem]:
    """Of a strategy that runs a transformers model: `role_problems`, and its adapters, attention and packing."""
    role, attention, problems = (
        context.role,
        context.attn_implementation,
        [*lora.problems(context), *role_problems(context, strategy)],
    )
    if attention.startswith("flash_attention"):
        if importlib.util.find_spec("flash_attn") is None:
            text = f"{attention} needs the package flash_attn. Fix: sdpa"
            problems.append(Problem(f"{role}.model_args.attn_implementation", text, machine=True))
        if context.dtype == "fp32":
            problems.append(
                Problem(f"{role}.model_args.attn_implementation", f"{attention} needs dtype bf16 or fp16. Fix: sdpa")
            )
    if context.use_sequence_packing:
        if not varlen(attention) and attention not in DENSE:
            problems.append(
                Problem(
                    f"{role}.use_sequence_packing",
                    f"{attention} is not packed by strategy {strategy}. Fix: model_args.attn_implementation: sdpa, or"
                    " use_sequence_packing: false",
                )
            )
        if None in (context.max_tokens_per_microbatch_in_train, context.max_tokens_per_microbatch_in_infer):
            problems.append(
                Problem(
                    f"{role}.use_sequence_packing",
                    "needs both token budgets. Fix: max_tokens_per_microbatch_in_train and _in_infer",
                )
            )
    return problems
