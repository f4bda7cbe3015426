"""Questions to a chat endpoint: each asked once in a process, again where that may help, within a time; what fails is
told and not remembered."""

from __future__ import annotations

import atexit
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import lru_cache
from threading import Lock
from typing import Any

import httpx2

from turnwise_serving.endpoint import key_from
from turnwise_serving.http import reason

AGAIN = frozenset({408, 409, 425, 429})
"""HTTP states that may pass, beside the server errors (500 and above)."""
REMEMBERED = 20_000
"""Answers that are kept."""

Answer = tuple[str, float]


class Unanswered(Exception):
    """No usable answer came; the message says what came instead, and the fix."""


_making = Lock()


class Asking:
    """A client of the endpoint at `url`, for all threads of a process."""

    def __init__(self, url: str, key: str | None) -> None:
        self._client = httpx2.Client(
            base_url=url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self._lock = Lock()
        self._answers: OrderedDict[bytes, Future[Answer]] = OrderedDict()

    @staticmethod
    def of(url: str, key_variable: str | None) -> Asking:
        """The one of this process."""
        # Threads that ask first at the same moment must not have one each.
        with _making:
            return _made(url, key_variable)

    def ask(
        self,
        body: Mapping[str, Any],
        read: Callable[[str], float | None],
        *,
        timeout: float,
        retries: int,
        wait: float,
    ) -> Answer:
        """What the endpoint answers, and the number that `read` finds in it. Raises Unanswered after `timeout` seconds or
        `retries` + 1 requests."""
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
        with self._lock:
            waiting = self._answers.get(digest)
            asked = waiting is None
            if waiting is None:
                waiting = self._answers[digest] = Future()
            self._answers.move_to_end(digest)
            if len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        if not asked:
            # Somebody asks the same at this moment, or did.
            try:
                return waiting.result(timeout)
            except TimeoutError as error:
                raise Unanswered(
                    f"no answer within {timeout:g} s. Fix: raise timeout, or look at the endpoint."
                ) from error
        try:
            answer = self._asked(body, read, time.monotonic() + timeout, timeout, retries, wait)
        except BaseException as error:
            with self._lock:
                self._answers.pop(digest, None)
            waiting.set_exception(error)
            raise
        waiting.set_result(answer)
        return answer

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _asked(
        self,
        body: Mapping[str, Any],
        read: Callable[[str], float | None],
        deadline: float,
        timeout: float,
        retries: int,
        wait: float,
    ) -> Answer:
        last = ""
        for again in range(retries + 1):
            if again:
                time.sleep(max(0.0, min(wait * 2 ** (again - 1), deadline - time.monotonic())))
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unanswered(f"no answer within {timeout:g} s{last}. Fix: raise timeout, or look at the endpoint.")
            said, last = self._once(body, left)
            number = None if said is None else read(said)
            if said is not None and number is not None:
                return said, number
            if said is not None:
                last = f" (it said {said[-120:]!r}, without a mark)"
        fix = "a rubric or model that gives marks, or look at the endpoint"
        raise Unanswered(f"no answer in {retries + 1} requests{last}. Fix: {fix}.")

    def _once(self, body: Mapping[str, Any], left: float) -> tuple[str | None, str]:
        """One request: (text, ""), or (None, why there is none) where another may help. Raises Unanswered where none will."""
        try:
            answer = self._client.post("chat/completions", json=dict(body), timeout=left)
        except httpx2.HTTPError as error:
            return None, f" ({type(error).__name__}: {error})"
        if answer.status_code in AGAIN or answer.status_code >= 500:
            return None, f" (state {answer.status_code}: {reason(answer.text, 200)})"
        if answer.status_code != 200:
            raise Unanswered(
                f"it refuses with state {answer.status_code}: {reason(answer.text, 200)}. Fix: model, base_url, api_key_env or"
                " extra_body."
            )
        try:
            text = answer.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            return None, f" (no choice in {answer.text[:120]!r})"
        return (text, "") if isinstance(text, str) else (None, " (a message without text)")


@lru_cache(maxsize=16)
def _made(url: str, key_variable: str | None) -> Asking:
    made = Asking(url, key_from(key_variable))
    atexit.register(made.close)
    return made
