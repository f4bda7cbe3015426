"""SGLang's HTTP interface as far as a backend needs it: JSON in, JSON out, and every failure told as one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2

from turnwise.errors import EngineError
from turnwise_sglang import memory


class Gone(Exception):
    """The connection broke: the server died, or is not there."""


class Api:
    """Calls to one server. `timeout`: seconds for a call that is no response to sample. One event loop, until `close`."""

    def __init__(self, url: str, timeout: float, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # No limit on connections: the engine queues. Nor a proxy: the environment's would see loopback calls.
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx2.Timeout(timeout, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def healthy(self) -> bool:
        """Whether it answers, within a few seconds."""
        try:
            return (await self._client.get("/health", timeout=5.0)).status_code == 200
        except httpx2.HTTPError:
            return False

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`. Raises Gone, EngineError."""
        return self._object(path, await self._sent("GET", path, None, None))

    async def post(self, path: str, body: Mapping[str, Any] | bytes | None = None, timeout: float | None = None) -> dict[str, Any]:
        """The JSON answer to `body` (`bytes`: JSON already). Raises Gone; EngineError for an HTTP error and for `success: false`."""
        return self._object(path, await self._sent("POST", path, body, timeout))

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        """As `post`, for what answers in plain text."""
        response = await self._sent("POST", path, body, None)
        if response.status_code != 200:
            raise self._refused(path, response.status_code, response.text)
        return response.text

    async def stream(self, path: str, body: Mapping[str, Any], timeout: float) -> AsyncIterator[dict[str, Any]]:
        """The server-sent JSON objects in answer to `body`. Raises Gone, EngineError."""
        try:
            async with self._client.stream("POST", path, json=body, timeout=httpx2.Timeout(timeout, pool=None)) as response:
                if response.status_code != 200:
                    raise self._refused(path, response.status_code, (await response.aread()).decode(errors="replace"))
                async for line in response.aiter_lines():
                    if not line.startswith("data:") or (data := line.removeprefix("data:").strip()) == "[DONE]":
                        continue
                    told = json.loads(data)
                    if "error" in told:
                        raise self._refused(path, 200, data)
                    yield told
        except httpx2.TimeoutException as error:
            raise self._slow(path, timeout) from error
        except httpx2.HTTPError as error:
            raise Gone(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Break off every call."""
        await self._client.aclose()

    async def _sent(self, method: str, path: str, body: Mapping[str, Any] | bytes | None, timeout: float | None) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(dict(body or {})).encode()
        sent: dict[str, Any] = {} if method == "GET" else {"content": content, "headers": {"Content-Type": "application/json"}}
        if timeout is not None:
            sent["timeout"] = httpx2.Timeout(timeout, pool=None)
        try:
            return await self._client.request(method, path, **sent)
        except httpx2.TimeoutException as error:
            raise self._slow(path, timeout) from error
        except httpx2.HTTPError as error:
            raise Gone(f"{type(error).__name__}: {error}") from error
        except RuntimeError as error:  # the client was closed meanwhile
            raise Gone(str(error)) from error

    def _object(self, path: str, response: httpx2.Response) -> dict[str, Any]:
        try:
            told = response.json()
        except ValueError:
            told = None
        if response.status_code != 200 or not isinstance(told, dict) or told.get("success") is False:
            raise self._refused(path, response.status_code, response.text)
        return told

    def _refused(self, path: str, status: int, text: str) -> EngineError:
        try:
            told = json.loads(text)
            message = told.get("message") or told.get("error_message") or told.get("detail") or told.get("error") or text
            message = message.get("message", message) if isinstance(message, dict) else message
        except (ValueError, AttributeError):
            message = text
        fix = " Fix: strategy_config.api_key_env" if status in (401, 403) else ""
        refused = f"SGLang refused {path} ({status}): {' '.join(str(message).split())[:600]}{fix}"
        return EngineError(memory.told(refused, text, memory.phase(path)))

    def _slow(self, path: str, timeout: float | None) -> EngineError:
        limit = "control_timeout" if timeout is None else "request_timeout" if path == "/generate" else "weight_sync_timeout"
        return EngineError(f"SGLang at {self.url} did not answer {path} within {limit}")
