"""Between our messages and the endpoint's JSON: content parts, images as data URLs, and what an answer holds."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from turnwise.contracts.chat import Message
from turnwise.contracts.inference import Request
from turnwise.data.trajectory import Generation, float32, int32
from turnwise.errors import EngineError
from turnwise_openai.config import OpenAIConfig


def body(request: Request, config: OpenAIConfig) -> dict[str, Any]:
    """The JSON of /chat/completions. Raises EngineError: the request has no messages."""
    if not request.messages:
        raise EngineError(f"the openai backend takes messages, and the request{_where(request)} has none")
    args = request.args
    payload: dict[str, Any] = {
        "model": config.model,
        "messages": [_message(message) for message in request.messages],
        config.max_tokens_key: request.max_new_tokens,
        "temperature": args.temperature,
    }
    if args.top_p < 1:
        payload["top_p"] = args.top_p
    # No key of OpenAI's own API, so it is sent only where it is on.
    if args.top_k:
        payload["top_k"] = args.top_k
    if args.stop_strings:
        payload["stop"] = list(args.stop_strings)
    if config.send_seed:
        # Some endpoints keep it in 32 signed bits.
        payload["seed"] = request.seed % 2**31
    if config.logprobs != "none":
        payload["logprobs"] = True
    # Last, so that what the user writes wins.
    return {**payload, **config.extra_body}


def _message(message: Message) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return dict(part)
    return {"type": "image_url", "image_url": {"url": data_url(part["image"])}}


def data_url(image: np.ndarray) -> str:
    """A uint8 H×W×3 image as a PNG in a data URL (PNG specification, sections 5 and 11; filter 0)."""
    height, width, channels = image.shape
    if image.dtype != np.uint8 or channels != 3:
        raise EngineError(f"an image of shape {image.shape} and dtype {image.dtype} is none of uint8 H×W×3")
    # Each row begins with the number of its filter.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, width * 3)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()


def generation(answer: Mapping[str, Any], request: Request, config: OpenAIConfig) -> Generation:
    """A Generation from the endpoint's answer. Token ids (`return_token_ids`) and log-probs where it holds them, else
    None.

    Raises EngineError for an answer without a choice.
    """
    try:
        choice = answer["choices"][0]
        text = choice["message"].get("content") or ""
    except (LookupError, TypeError, AttributeError) as error:
        raise EngineError(f"the endpoint's answer{_where(request)} holds no choice: {str(answer)[:200]}") from error
    # Endpoints have further reasons (tool_calls, content_filter): all end the response.
    finish: Any = "length" if choice.get("finish_reason") == "length" else "stop"
    # vLLM names the stop string in stop_reason, SGLang in matched_stop.
    stopped_by = choice.get("stop_reason", choice.get("matched_stop"))
    if (
        isinstance(stopped_by, str)
        and request.args.include_stop_str_in_output
        and stopped_by in request.args.stop_strings
    ):
        text += "" if text.endswith(stopped_by) else stopped_by
    # vLLM's name and SGLang's.
    found = choice.get("token_ids") or choice.get("response_token_ids")
    if not found:
        return Generation(text, None, None, None, finish)
    ids = int32(found)
    # No update ever reaches an endpoint, so all tokens are of version 0.
    return Generation(text, ids, _logprobs(choice, request, config, len(ids)), np.zeros(len(ids), np.int32), finish)


def _logprobs(choice: Mapping[str, Any], request: Request, config: OpenAIConfig, count: int) -> np.ndarray | None:
    """float32 [count], or None: not there, of another length, or taken before a temperature that changes them."""
    content = (choice.get("logprobs") or {}).get("content") or []
    if config.logprobs == "none" or len(content) != count:
        return None
    # Greedy counts as temperature 1, so there too they are the ones before any temperature.
    if config.logprobs == "raw" and request.args.temperature not in (0.0, 1.0):
        return None
    return float32([token["logprob"] for token in content])


def _where(request: Request) -> str:
    return f" of {request.tag}" if request.tag else ""
