"""The options of the endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen, validators


@frozen
class OpenAIConfig:
    """`model` as the endpoint calls it, at `base_url` (with its `/v1`); the key is read from the environment variable
    `api_key_env` (None: no key).

    `timeout`: seconds for one answer; `max_retries`: how often a request is sent again after 408, 409, 425, 429, a
    server error or a broken connection, waiting `retry_wait` × 2ⁿ seconds or what the endpoint asks for, at most
    `retry_wait_limit`; `max_concurrency`: requests at once.
    `max_tokens_key`: the name of the length limit (newer hosted models want `max_completion_tokens`); `send_seed`:
    whether the request's seed is sent; `extra_body`: further keys of every request, as they are. `logprobs`: what the
    endpoint's log-probs are: `raw` (before the temperature), `scaled` (after it), `none` (do not ask).
    """

    model: str = field(validator=validators.min_len(1))
    base_url: str = "https://api.openai.com/v1"
    api_key_env: str | None = "OPENAI_API_KEY"
    timeout: float = field(default=120.0, validator=validators.gt(0))
    max_retries: int = field(default=5, validator=validators.ge(0))
    retry_wait: float = field(default=1.0, validator=validators.gt(0))
    retry_wait_limit: float = field(default=60.0, validator=validators.gt(0))
    max_concurrency: int = field(default=16, validator=validators.ge(1))
    max_tokens_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    send_seed: bool = True
    logprobs: Literal["none", "raw", "scaled"] = "none"
    extra_body: Mapping[str, Any] = field(factory=dict)
