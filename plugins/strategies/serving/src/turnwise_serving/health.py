"""Waiting for a server of ours, which may end before it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from turnwise.errors import EngineError
from turnwise_serving.http import Client
from turnwise_serving.process import ServerProcess

# Seconds between two questions.
_POLL = 0.2


async def until_healthy(server: ServerProcess, client: Client, timeout: float, closed: Callable[[], bool]) -> None:
    """Return when it answers. Raises EngineError: it ended, is not up within `timeout` seconds (`start_timeout`), or
    nobody waits any more."""
    deadline = time.monotonic() + timeout
    while not await client.healthy():
        if closed():
            raise EngineError("the backend was closed")
        if not server.alive:
            ended = f"{server.engine} did not start ({server.how_it_ended()}), log {server.log}: {server.tail()}"
            raise EngineError(server.memory.explained(ended, server.words(), "the start"))
        if time.monotonic() > deadline:
            slow = (
                f"{server.engine} did not answer within start_timeout = {timeout:g} s, log {server.log}:"
                f" {server.tail()}"
            )
            raise EngineError(f"{slow}. Fix: raise strategy_config.start_timeout")
        await asyncio.sleep(_POLL)
