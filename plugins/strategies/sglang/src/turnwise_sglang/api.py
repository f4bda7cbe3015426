"""SGLang's HTTP interface as far as a backend needs it: JSON in, JSON out, and every failure as one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from turnwise.errors import EngineError
from turnwise_serving.http import Client, Refused, Response, Slow, reason
from turnwise_sglang.memory import MEMORY


class Api(Client):
    """Calls to one server; each raises Gone where the connection breaks, and EngineError for all else. `timeout`:
    seconds for a call that is no response to sample."""

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`."""
        return self._object(path, await self._answered("GET", path, None, None))

    async def post(
        self, path: str, body: Mapping[str, Any] | bytes | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """The JSON answer to `body` (`bytes`: JSON already); `success: false` is an EngineError too."""
        return self._object(path, await self._answered("POST", path, body or {}, timeout))

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        """As `post`, for what answers in plain text."""
        response = await self._answered("POST", path, body or {}, None)
        if response.status_code != 200:
            raise self._refused(path, response.status_code, response.text)
        return response.text

    async def stream(self, path: str, body: Mapping[str, Any], timeout: float) -> AsyncIterator[dict[str, Any]]:
        """The server-sent JSON objects in answer to `body`."""
        try:
            async for data in self.events(path, body, timeout):
                payload = json.loads(data)
                # An error after the stream has begun comes as data: the status was 200 already.
                if "error" in payload:
                    raise self._refused(path, 200, data)
                yield payload
        except Slow as error:
            raise self._slow(path, timeout) from error
        except Refused as error:
            raise self._refused(path, error.status, error.text) from error

    async def _answered(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None, timeout: float | None
    ) -> Response:
        try:
            return await self.send(method, path, body, timeout)
        except Slow as error:
            raise self._slow(path, timeout) from error

    def _object(self, path: str, response: Response) -> dict[str, Any]:
        try:
            payload = response.json()
        except ValueError:
            payload = None
        # SGLang reports a failed update with status 200 and success: false.
        if response.status_code != 200 or not isinstance(payload, dict) or payload.get("success") is False:
            raise self._refused(path, response.status_code, response.text)
        return payload

    def _refused(self, path: str, status: int, text: str) -> EngineError:
        fix = " Fix: strategy_config.api_key_env" if status in (401, 403) else ""
        refused = f"SGLang refused {path} ({status}): {reason(text)}{fix}"
        return EngineError(MEMORY.explained(refused, text, MEMORY.phase(path)))

    def _slow(self, path: str, timeout: float | None) -> EngineError:
        # The key to raise, which differs by what was asked.
        limit = "control_timeout" if timeout is None else "weight_sync_timeout"
        return EngineError(f"SGLang at {self.url} did not answer {path} within {limit}")
