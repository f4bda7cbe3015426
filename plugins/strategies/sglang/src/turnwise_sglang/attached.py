"""Whether a server that was started by somebody else fits this run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnwise.contracts.inference import InferenceContext
from turnwise_serving.models import DTYPES, other_model
from turnwise_sglang.arguments import OUTLASTING, SPARE, STALE
from turnwise_sglang.config import SglangConfig

ALIASES = {"half": "float16", "float": "float32"}
"""What SGLang also calls its dtypes."""


def attach_problems(config: SglangConfig, context: InferenceContext, facts: dict[str, Any]) -> list[str]:
    """What keeps an attached server (its /server_info, with the `model_path` of now) from doing what the options
    promise and the run needs."""
    problems = []
    where = f"the SGLang server at {config.base_url}"
    if why := other_model(context, str(facts["model_path"])):
        fix = f"Fix: start it with --model-path {Path(str(context.model)).resolve()}"
        problems.append(f"{where} has the model {facts['model_path']}, and {why}. {fix}")
    if ALIASES.get(facts["dtype"], facts["dtype"]) != DTYPES[context.dtype]:
        problems.append(
            f"{where} has the dtype {facts['dtype']}, the run {context.dtype}. Fix: start it with --dtype"
            f" {DTYPES[context.dtype]}"
        )
    if facts["max_req_input_len"] < context.sequence_length:
        fix = (
            f"Fix: start it with --context-length {context.sequence_length + SPARE}, and a cache (--max-total-tokens)"
            " of no less"
        )
        problems.append(
            f"{where} takes {facts['max_req_input_len']} tokens, and sequence_length is {context.sequence_length}."
            f" {fix}"
        )
    if config.enable_deterministic_inference and not facts.get("enable_deterministic_inference"):
        problems.append(
            f"{where} runs without enable_deterministic_inference, so it ignores the seeds of requests. "
            "Fix: start it so, or strategy_config: {enable_deterministic_inference: false}"
        )
    if context.lora is not None and not facts.get("enable_lora"):
        fix = (
            "Fix: start it with enable_lora, max_lora_rank and lora_target_modules, or"
            " actor_train.model_args.lora_sync: merged"
        )
        problems.append(f"{where} runs without enable_lora, so it takes no adapters alone. {fix}")
    for name in OUTLASTING:
        if context.updates and facts.get(name):
            problems.append(f"{where} runs with {name}: {STALE}. Fix: start it without")
    if int(facts.get("dp_size") or 1) != config.dp_size:
        problems.append(
            f"{where} has dp_size {facts.get('dp_size')}, the configuration {config.dp_size}. Fix: write the server's"
        )
    return problems
