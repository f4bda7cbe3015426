"""A player behind an OpenAI-compatible endpoint: requests as messages, a few at a time, sent again where that may help."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

from turnwise.contracts.inference import InferenceContext, Request
from turnwise.contracts.player import Player
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError, MachineError
from turnwise_openai.config import OpenAIConfig
from turnwise_openai.messages import body, generation

AGAIN = frozenset({408, 409, 425, 429})
"""HTTP states that may pass, beside the server errors (500 and above)."""


class OpenAIBackend(Player):
    """`turnwise.contracts.inference.InferenceBackend` of `input: messages`: evaluation and rollout work, training is refused before it starts."""

    def __init__(self, config: OpenAIConfig, context: InferenceContext) -> None:
        """Sends nothing; nothing of the context matters to it. Raises MachineError: the key's environment variable is not set."""
        if problem := _key_problem(config):
            raise MachineError(problem)
        self._config = config
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._client: httpx2.AsyncClient | None = None
        self._tasks: dict[Request, asyncio.Task[Generation]] = {}
        self._closed = False

    @staticmethod
    def check(config: OpenAIConfig, context: InferenceContext) -> list[str]:
        """The address, and the key's environment variable."""
        problems = []
        if urlsplit(config.base_url).scheme not in ("http", "https"):
            problems.append(
                f"$.actor_infer.strategy_args.strategy_config.base_url: {config.base_url!r} is no address. Fix: such as http://127.0.0.1:8000/v1"
            )
        if problem := _key_problem(config):
            problems.append(f"machine: {problem}")
        return problems

    async def generate(self, request: Request) -> Generation:
        """One answer. Raises EngineError in one line: the endpoint refused, was too slow, or could not be reached."""
        if self._closed:
            raise EngineError("the backend was closed")
        task = asyncio.ensure_future(self._answer(request, body(request, self._config)))
        self._tasks[request] = task
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._closed and current is not None and not current.cancelling():
                raise EngineError("the backend was closed") from None
            raise
        finally:
            self._tasks.pop(request, None)

    async def abort(self, request: Request) -> None:
        """Cancel the request's `generate`. A request that is not here is ignored."""
        if task := self._tasks.get(request):
            task.cancel()

    async def close(self) -> None:
        """Break off what waits, close the connections; may be called twice."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _answer(self, request: Request, told: Mapping[str, Any]) -> Generation:
        async with self._slots:
            for again in range(self._config.max_retries + 1):
                response, problem = await self._sent(told)
                if response is not None and response.status_code == 200:
                    return generation(_json(response, self._config), request, self._config)
                if response is not None and response.status_code not in AGAIN and response.status_code < 500:
                    raise EngineError(_refused(response, self._config))
                if again < self._config.max_retries:
                    await asyncio.sleep(self._wait(again, response))
            told_last = problem if response is None else _refused(response, self._config)
            raise EngineError(f"{told_last}, {self._config.max_retries + 1} times")

    async def _sent(self, told: Mapping[str, Any]) -> tuple[httpx2.Response | None, str]:
        """The answer, or None with why there is none."""
        config = self._config
        try:
            return await self._connection().post("chat/completions", json=told), ""
        except httpx2.TimeoutException:
            return None, f"{config.base_url} did not answer within timeout = {config.timeout:g} s"
        except httpx2.HTTPError as error:
            return None, f"{config.base_url} cannot be reached ({type(error).__name__}: {error})"

    def _connection(self) -> httpx2.AsyncClient:
        if self._client is None:
            key = os.environ.get(self._config.api_key_env) if self._config.api_key_env else None
            self._client = httpx2.AsyncClient(
                base_url=self._config.base_url.rstrip("/") + "/",
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx2.Timeout(self._config.timeout, pool=None),
                limits=httpx2.Limits(max_connections=self._config.max_concurrency),
                # The environment's proxy is for hosts outside this machine.
                trust_env=urlsplit(self._config.base_url).hostname not in ("127.0.0.1", "localhost", "::1"),
            )
        return self._client

    def _wait(self, again: int, response: httpx2.Response | None) -> float:
        """Seconds until the next attempt: what the endpoint asks for, else twice as long each time."""
        asked = response.headers.get("retry-after", "") if response is not None else ""
        try:
            wait = float(asked)
        except ValueError:  # absent, or a date
            wait = self._config.retry_wait * 2.0**again
        return min(max(wait, 0.0), self._config.retry_wait_limit)


def _key_problem(config: OpenAIConfig) -> str:
    if config.api_key_env is None or config.api_key_env in os.environ:
        return ""
    return (
        f"strategy openai: the environment variable {config.api_key_env} with the endpoint's key is not set. "
        "Fix: set it, or api_key_env: another name, or null for an endpoint without keys"
    )


def _json(response: httpx2.Response, config: OpenAIConfig) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise EngineError(
            f"{config.base_url} does not speak JSON: {response.text[:100]!r}. Fix: correct base_url (it usually ends with /v1)"
        ) from error


def _refused(response: httpx2.Response, config: OpenAIConfig) -> str:
    """One line for an HTTP error: the endpoint's own words, and what to do."""
    try:
        told = json.loads(response.text)
        error = told.get("error", told)
        words = error.get("message", error) if isinstance(error, dict) else error
        words = told.get("message", words)
    except (ValueError, AttributeError):
        words = response.text
    fixes = {
        401: f"Fix: check the key in {config.api_key_env}",
        403: f"Fix: check what the key in {config.api_key_env} may do",
        404: f"Fix: check model {config.model!r} and base_url",
        429: "Fix: lower max_concurrency, or raise max_retries and retry_wait",
    }
    fix = f" {fixes[response.status_code]}" if response.status_code in fixes else ""
    return f"{config.base_url} answered {response.status_code} for model {config.model!r}: {' '.join(str(words).split())[:300] or 'nothing'}.{fix}"
