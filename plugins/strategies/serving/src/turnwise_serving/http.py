"""Calls to one server: JSON goes out, text comes back, and a failure is one of three: it is gone, it is slow, it
refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

Response = httpx2.Response


class Gone(Exception):
    """The connection broke: the server died, or is not there."""


class Slow(Exception):
    """No answer came within the limit."""


class Client:
    """A client of the server at `url`, for one event loop, until `close`.

    `timeout`: seconds for a call that names none of its own; `key`: sent with every call; `connections`: at once (None:
    no limit, the engine queues); `keep_alive`: connections kept for later calls; `proxies`: whether those of the
    environment are used, which are for hosts outside this machine.
    """

    def __init__(
        self,
        url: str,
        timeout: float,
        key: str | None = None,
        connections: int | None = None,
        keep_alive: int = 64,
        proxies: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # No limit on the wait for a free connection: a request in our own queue is not the server's delay.
            timeout=httpx2.Timeout(timeout, pool=None),
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=keep_alive),
            trust_env=proxies,
        )

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """The answer, whatever its status, to `body` (JSON; `bytes`: JSON already; None: none). Raises Gone, Slow."""
        request: dict[str, Any] = {"headers": dict(headers or {})}
        if body is not None:
            request["content"] = body if isinstance(body, bytes) else json.dumps(body).encode()
            request["headers"]["Content-Type"] = "application/json"
        if timeout is not None:
            request["timeout"] = httpx2.Timeout(timeout, pool=None)
        with _failures(path):
            return await self._client.request(method, path, **request)

    async def events(self, path: str, body: Mapping[str, Any], timeout: float) -> AsyncIterator[str]:
        """The data of the server-sent events in answer to `body`, without the closing `[DONE]`. Raises Gone, Slow;
        Refused for another status."""
        with _failures(path):
            async with self._client.stream(
                "POST", path, json=body, timeout=httpx2.Timeout(timeout, pool=None)
            ) as response:
                # Refused is none of the errors that `_failures` translates: the server is there, and has said why.
                if response.status_code != 200:
                    raise Refused(response.status_code, (await response.aread()).decode(errors="replace"))
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (data := line.removeprefix("data:").strip()) != "[DONE]":
                        yield data

    async def healthy(self, timeout: float = 5.0) -> bool:
        """Whether it answers /health in time."""
        try:
            return (await self.send("GET", "/health", timeout=timeout)).status_code == 200
        except (Gone, Slow):
            return False

    async def close(self) -> None:
        """Break off every call."""
        await self._client.aclose()


class Refused(Exception):
    """A stream that the server did not begin: `status` and `text` of its answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


@contextmanager
def _failures(path: str) -> Iterator[None]:
    """What the library raises, as Gone or Slow."""
    try:
        yield
    # Before HTTPError, of which it is a kind.
    except httpx2.TimeoutException as error:
        raise Slow(path) from error
    except httpx2.HTTPError as error:
        raise Gone(f"{type(error).__name__}: {error}") from error
    # The client was closed meanwhile.
    except RuntimeError as error:
        raise Gone(str(error)) from error


def reason(text: str, most: int = 600) -> str:
    """Why a server refused, on one line of at most `most` characters: the message in the JSON of its answer, else the
    answer."""
    try:
        payload = json.loads(text)
    except ValueError:
        return _one_line(text, most)
    # Engines and frameworks name it differently: OpenAI's {"error": {"message"}}, FastAPI's {"detail"}, SGLang's
    # {"message"}.
    found: Any = text
    if isinstance(payload, dict):
        error = payload.get("error")
        nested = error.get("message", error) if isinstance(error, dict) else error
        given = (payload.get("message"), payload.get("error_message"), payload.get("detail"), nested)
        found = next((words for words in given if words), text)
    return _one_line(str(found), most)


def _one_line(text: str, most: int) -> str:
    return " ".join(text.split())[:most] or "no reason"
