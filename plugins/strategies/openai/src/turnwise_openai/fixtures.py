"""What the conformance kit needs: an endpoint on loopback that answers by seed, and requests of messages."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import random
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise_openai.config import OpenAIConfig

_ACTIONS = ("Left", "Right", "Up", "Down")
Answer = Callable[[dict[str, Any]], tuple[int, Any] | tuple[int, Any, dict[str, str]]]
"""A request's JSON → the status and the JSON of the answer, and further headers of it."""


class Endpoint:
    """A tiny OpenAI-compatible server on loopback; `seen` holds the requests (path, headers, JSON) as they came."""

    def __init__(self, answer: Answer) -> None:
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.seen.append((self.path, dict(self.headers), payload))
                status, content, *headers = answer(payload)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                with contextlib.suppress(ConnectionError):  # the client gave up
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(data)), **dict(*headers)}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                """Nothing on the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="endpoint", daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def said(text: str, finish: str = "stop", **more: Any) -> dict[str, Any]:
    """A completion with one choice; `more`: further keys of it."""
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish, **more}]
    }


@functools.cache
def _endpoint() -> Endpoint:
    endpoint = Endpoint(lambda payload: (200, said(random.Random(payload["seed"]).choice(_ACTIONS))))
    atexit.register(endpoint.close)
    return endpoint


def _request(seed: int = 0) -> Request:
    return Request(seed, GeneratingArgs(), 16, messages=({"role": "user", "content": "Which way?"},), actions=_ACTIONS)


def backend_fixture() -> dict[str, Any]:
    """`config` (the loopback endpoint), `context`, and `request(seed)`: a Request with messages."""
    config = OpenAIConfig(model="a-model", base_url=_endpoint().url, api_key_env=None)
    return {"config": config, "context": InferenceContext(None, None), "request": _request}
