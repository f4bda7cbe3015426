"""The key of a vLLM server that a run started, asked for on every route: vLLM's own check leaves out those of weights,
pauses and workers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

KEY = "VLLM_API_KEY"
"""vLLM's own environment variable: a command line could be read by every user of the machine."""
_OPEN = "/health"

App = Callable[[Mapping[str, Any], Any, Any], Awaitable[None]]


class Guard:
    """ASGI middleware (vLLM's `--middleware`): 401 for whoever lacks the key, but for the question whether the server
    is up."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Pass the call on, or refuse it."""
        given = dict(scope.get("headers") or ()).get(b"authorization", b"")
        # Compared in a time that says nothing of how many letters were right.
        if scope["type"] == "lifespan" or scope["path"] == _OPEN or secrets.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send(
                {"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
