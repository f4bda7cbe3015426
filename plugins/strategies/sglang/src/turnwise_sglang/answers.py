"""What a request becomes for SGLang, and what SGLang's answer becomes for us."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import Request, checked_ids
from turnwise.data.trajectory import Generation, float32, int32
from turnwise.errors import EngineError
from turnwise_serving.answers import cut, token_versions


@frozen
class Limits:
    """What a request is checked against, before it can harm the server: ids outside the vocabulary kill SGLang's
    scheduler. `sees`: images are no harm."""

    sequence_length: int
    vocabulary: int
    sees: bool = False


def body(request: Request, limits: Limits, stop_ids: Sequence[int]) -> dict[str, Any]:
    """The JSON of /generate, without its `rid` and images. Raises EngineError for a request that cannot be served."""
    args = request.args
    ids = checked_ids(request, "sglang", limits.vocabulary, limits.sequence_length)
    if request.images and not limits.sees:
        where = f" (request of {request.tag})" if request.tag else ""
        count = len(request.images)
        raise EngineError(
            f"the request{where} holds {count} images, and the model takes text only. Fix: a text rendering of the"
            " environment"
        )
    return {
        "input_ids": ids.tolist(),
        "return_logprob": True,
        # The server has no tokenizer to look for stop strings with, so they are sought here while tokens arrive.
        "stream": bool(args.stop_strings),
        "sampling_params": {
            "max_new_tokens": min(request.max_new_tokens, limits.sequence_length - len(ids)),
            "temperature": args.temperature,
            "top_p": args.top_p,
            # SGLang's word for no limit.
            "top_k": args.top_k or -1,
            "stop_token_ids": list(stop_ids),
            "sampling_seed": _signed(request.seed),
        },
    }


def _signed(seed: int) -> int:
    """A seed of any size as the 64 signed bits that SGLang takes."""
    return (seed + 2**63) % 2**64 - 2**63


class StopStrings:
    """Looks for a request's stop strings in ids as they arrive, token by token."""

    def __init__(self, request: Request, chat: Chat) -> None:
        self._strings, self._chat = request.args.stop_strings, chat
        # A character is at most four tokens of a byte-level tokenizer; the rest is for a character cut at the front.
        self._tail = 4 * max(map(len, self._strings), default=0) + 4
        self._seen = 0

    def length(self, ids: Sequence[int]) -> int | None:
        """How many ids there are up to the token that completed a stop string; None: none so far."""
        for length in range(self._seen + 1, len(ids) + 1):
            text = self._chat.decode(int32(ids[max(0, length - self._tail) : length]), special=True)
            if any(string in text for string in self._strings):
                return length
        self._seen = len(ids)
        return None


def continued(payload: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The body that goes on where the answer `before` was broken off."""
    if before is None:
        return dict(payload)
    ids, params = before["output_ids"], payload["sampling_params"]
    # The seed stays: SGLang draws by seed and position, and the positions go on.
    left = {**params, "max_new_tokens": params["max_new_tokens"] - len(ids)}
    return {**payload, "input_ids": [*payload["input_ids"], *ids], "sampling_params": left}


def joined(before: Mapping[str, Any] | None, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Two answers, the second of which goes on where the first was broken off, as one."""
    old = before or {"output_ids": [], "meta_info": {}}
    facts, start = answer["meta_info"], len(old["output_ids"])
    spans = [
        {**span, "start": span["start"] + start, "end": span["end"] + start}
        for span in facts.get("weight_versions") or ()
    ]
    whole = {
        "output_token_logprobs": [
            *old["meta_info"].get("output_token_logprobs", ()),
            *(facts.get("output_token_logprobs") or ()),
        ],
        "weight_versions": [*old["meta_info"].get("weight_versions", ()), *spans],
        # What went in again with the prompt is part of the response.
        "prompt_tokens": facts.get("prompt_tokens", 0) - start,
    }
    return {"output_ids": [*old["output_ids"], *(answer.get("output_ids") or ())], "meta_info": {**facts, **whole}}


def check_given_up(answer: Mapping[str, Any], ours: bool) -> None:
    """Raises EngineError for an answer that the server gave up, unless that was `ours`."""
    reason = answer["meta_info"]["finish_reason"]
    if not ours or reason.get("status_code"):
        raise EngineError(f"SGLang aborted a request: {reason.get('message') or 'no reason given'}")


def ended(answer: Mapping[str, Any], payload: Mapping[str, Any]) -> str:
    """How an answer that was broken off had ended already: `stop`, `length`, or "" if it had not."""
    ids, params = answer["output_ids"], payload["sampling_params"]
    if ids and ids[-1] in params["stop_token_ids"]:
        return "stop"
    return "length" if len(ids) >= params["max_new_tokens"] else ""


def generation(
    answer: Mapping[str, Any], request: Request, chat: Chat, ours: bool, length: int | None = None
) -> Generation:
    """A Generation from SGLang's last answer. `ours`: its log-probs are our log-probs; `length`: cut there, by a stop
    string.

    Raises EngineError for an answer that does not hold what was asked for.
    """
    facts = answer["meta_info"]
    if request.images and request.ids is not None and facts["prompt_tokens"] != len(request.ids):
        raise EngineError(
            f"SGLang saw a prompt of {facts['prompt_tokens']} tokens, the request has {len(request.ids)}: it divides"
            " images otherwise"
        )
    pairs = facts["output_token_logprobs"][:length]
    ids = int32([pair[1] for pair in pairs])
    logprobs = float32([pair[0] if pair[0] is not None else np.nan for pair in pairs])
    if list(answer["output_ids"][:length]) != ids.tolist() or not len(ids):
        raise EngineError(f"SGLang answered {len(ids)} log-probs for {len(answer['output_ids'])} tokens")
    if not np.isfinite(logprobs).all():
        raise EngineError("SGLang sampled with log-probs that are no numbers: the weights or the logits are broken")
    finish: Any = "stop" if length is not None else facts["finish_reason"]["type"]
    spans = [(span["version"], span["start"], span["end"]) for span in facts.get("weight_versions") or ()]
    versions = token_versions(spans, len(ids), "SGLang", fix="SGLang 0.5.21 or newer")
    return Generation(cut(chat.decode(ids), request.args), ids, logprobs if ours else None, versions, finish)
