"""One request and its answer, in our terms and in vLLM's: ids checked, sampling parameters, log-probs by our
definition, versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen

from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import GeneratingArgs, Request, checked_ids
from turnwise.data.trajectory import Generation, float32, int32
from turnwise.errors import EngineError
from turnwise_serving.answers import cut, token_versions

COLDEST = 0.01
"""vLLM raises a temperature between 0 and this one to this one."""


@frozen(eq=False)
class Answer:
    """What vLLM sampled: `ids`, `logprobs` of each (as its logprobs_mode has them), `spans` (version, start, end), and
    its own reason."""

    ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]
    finish: str


def prompt_ids(request: Request, vocabulary: int, longest: int) -> np.ndarray:
    """The request's ids, int32. Raises EngineError for what vLLM must not see
    (turnwise.contracts.inference.checked_ids), and for a temperature that it does not sample at."""
    ids = checked_ids(request, "vllm", vocabulary, longest, limit=f"{longest} tokens")
    if 0 < request.args.temperature < COLDEST:
        where = f" (request of {request.tag})" if request.tag else ""
        raise EngineError(
            f"temperature {request.args.temperature} is below {COLDEST}, the lowest that vLLM samples at{where}. Fix: 0"
            " (greedy), or more"
        )
    return ids


def sampling(request: Request, room: int, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Fields of vLLM's `SamplingParams`. The text is decoded by the chat; vLLM decodes only to find stop strings."""
    args = request.args
    fields: dict[str, Any] = {
        "max_tokens": min(request.max_new_tokens, room),
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        # Not negative: vLLM takes −1 for no seed.
        "seed": request.seed % 2**63,
        "stop_token_ids": list(stop_ids),
        # The chat's stop ids hold it, if it ends a turn.
        "ignore_eos": True,
        # The log-prob of the sampled token alone.
        "logprobs": 0,
        "detokenize": bool(args.stop_strings),
        "skip_special_tokens": False,
    }
    if args.stop_strings:
        fields |= {"stop": list(args.stop_strings), "include_stop_str_in_output": True}
    return fields


def are_ours(args: GeneratingArgs, mode: str) -> bool:
    """Whether vLLM's log-probs under `mode` are of log_softmax(logits / temperature) over the whole vocabulary (greedy:
    temperature 1).

    Processed ones are taken after truncation, raw ones before the temperature.
    """
    if mode == "raw_logprobs":
        return args.temperature in (0, 1)
    return args.temperature == 0 or (args.top_p == 1 and args.top_k == 0)


def generation(answer: Answer, request: Request, chat: Chat, mode: str) -> Generation:
    """The answer by our contract. Raises EngineError: log-probs that are no numbers, tokens without a version."""
    ids = int32(answer.ids)
    # None where they are of another definition: the trainer then computes its own.
    logprobs = float32(answer.logprobs) if are_ours(request.args, mode) else None
    # Also where they are not passed on: tokens drawn from such logits are worth nothing.
    if not np.isfinite(answer.logprobs).all():
        raise EngineError(
            "the model's logits are not finite, so nothing can be sampled. Fix: look at the last updates (learning"
            " rate, dtype)"
        )
    finish: Any = answer.finish if answer.finish in ("length", "abort") else "stop"
    return Generation(
        cut(chat.decode(ids), request.args), ids, logprobs, token_versions(answer.spans, len(ids), "vLLM"), finish
    )
