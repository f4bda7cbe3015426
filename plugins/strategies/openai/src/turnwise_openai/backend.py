"""A player behind an OpenAI-compatible endpoint: requests as messages, a few at a time, sent again where that may
help."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from turnwise.contracts.inference import InferenceContext, Request
from turnwise.contracts.player import Player
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError, MachineError, Problem
from turnwise_openai.config import OpenAIConfig
from turnwise_openai.messages import body, generation
from turnwise_serving.endpoint import endpoint_problems, key_from
from turnwise_serving.http import Client, Gone, Response, Slow, reason
from turnwise_serving.running import CLOSED, Running

AGAIN = frozenset({408, 409, 425, 429})
"""HTTP states that may pass, beside the server errors (500 and above)."""


class OpenAIBackend(Player):
    """`turnwise.contracts.inference.InferenceBackend` of `input: messages`: evaluation and rollout work, training is
    refused before it starts."""

    def __init__(self, config: OpenAIConfig, context: InferenceContext) -> None:
        """Sends nothing; nothing of the context matters to it. Raises MachineError: the key's environment variable is
        not set."""
        if lacks := [problem for problem in self.check(config, context) if problem.machine]:
            raise MachineError(str(lacks[0]))
        self._config = config
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._client: Client | None = None
        self._running = Running()
        self._closed = False

    @staticmethod
    def check(config: OpenAIConfig, context: InferenceContext) -> list[Problem]:
        """The address, and the key's environment variable."""
        return list(endpoint_problems("actor_infer.strategy_args.strategy_config", config.base_url, config.api_key_env))

    async def generate(self, request: Request) -> Generation:
        """One answer. Raises EngineError in one line: the endpoint refused, was too slow, or could not be reached."""
        if self._closed:
            raise EngineError(CLOSED)
        return await self._running.of(request, self._answer(request, body(request, self._config)))

    async def abort(self, request: Request) -> None:
        """Cancel the request's `generate`. A request that is not here is ignored."""
        self._running.abort(request)

    async def close(self) -> None:
        """Break off what waits, close the connections; may be called twice."""
        self._closed = True
        await self._running.close()
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _answer(self, request: Request, payload: Mapping[str, Any]) -> Generation:
        # Held while waiting for another attempt, too: an endpoint that is overrun gets no further requests.
        async with self._slots:
            for again in range(self._config.max_retries + 1):
                response, problem = await self._sent(payload)
                if response is not None and response.status_code == 200:
                    return generation(_json(response, self._config), request, self._config)
                if response is not None and response.status_code not in AGAIN and response.status_code < 500:
                    raise EngineError(_refused(response, self._config))
                # After the last attempt nothing is left to wait for.
                if again < self._config.max_retries:
                    await asyncio.sleep(self._wait(again, response))
            last = problem if response is None else _refused(response, self._config)
            raise EngineError(f"{last}, {self._config.max_retries + 1} times")

    async def _sent(self, payload: Mapping[str, Any]) -> tuple[Response | None, str]:
        """The answer, or None with why there is none."""
        config = self._config
        try:
            return await self._connection().send("POST", "/chat/completions", payload), ""
        except Slow:
            return None, f"{config.base_url} did not answer within timeout = {config.timeout:g} s"
        except Gone as error:
            return None, f"{config.base_url} cannot be reached ({error})"

    def _connection(self) -> Client:
        if self._client is None:
            # Here and not at the start, because a client belongs to the event loop of its calls.
            key = key_from(self._config.api_key_env)
            # Proxies of the environment are for other hosts.
            away = urlsplit(self._config.base_url).hostname not in ("127.0.0.1", "localhost", "::1")
            most = self._config.max_concurrency
            self._client = Client(
                self._config.base_url, self._config.timeout, key, connections=most, keep_alive=most, proxies=away
            )
        return self._client

    def _wait(self, again: int, response: Response | None) -> float:
        """Seconds until the next attempt: what the endpoint asks for, else twice as long each time."""
        asked = response.headers.get("retry-after", "") if response is not None else ""
        try:
            wait = float(asked)
        # Absent, or a date.
        except ValueError:
            wait = self._config.retry_wait * 2.0**again
        # In this order: what is not above 0 gives 0, also "nan", which float() reads and no timer ever reaches.
        return min(max(0.0, wait), self._config.retry_wait_limit)


def _json(response: Response, config: OpenAIConfig) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise EngineError(
            f"{config.base_url} does not speak JSON: {response.text[:100]!r}. Fix: correct base_url (it usually ends"
            " with /v1)"
        ) from error


def _refused(response: Response, config: OpenAIConfig) -> str:
    """One line for an HTTP error: the endpoint's own words, and what to do."""
    fixes = {
        401: f"Fix: check the key in {config.api_key_env}",
        403: f"Fix: check what the key in {config.api_key_env} may do",
        404: f"Fix: check model {config.model!r} and base_url",
        429: "Fix: lower max_concurrency, or raise max_retries and retry_wait",
    }
    fix = f" {fixes[response.status_code]}" if response.status_code in fixes else ""
    return (
        f"{config.base_url} answered {response.status_code} for model {config.model!r}:"
        f" {reason(response.text, 300)}.{fix}"
    )
