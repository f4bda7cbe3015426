"""The entrance of a backend: closed, new requests wait before it, and those that are through are answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class Gate:
    """Open at first. `flying`: requests that are through and not answered. `changed` is called when that number changes
    while the gate is closed, and when it closes."""

    def __init__(self) -> None:
        self.flying = 0
        self.changed: Callable[[], None] = lambda: None
        self._open = asyncio.Event()
        self._open.set()

    @property
    def closed(self) -> bool:
        """Whether new requests wait."""
        return not self._open.is_set()

    @contextlib.asynccontextmanager
    async def through(self) -> AsyncIterator[None]:
        """For the time of a request, which begins when the gate is open."""
        while self.closed:  # it may have been closed again before this task came to run
            await self._open.wait()
        # No await since the gate was seen open: whoever closes it finds this request among those that fly.
        self.flying += 1
        try:
            yield
        finally:
            self.flying -= 1
            if self.closed:
                self.changed()

    def close(self) -> None:
        """From now on new requests wait."""
        self._open.clear()
        self.changed()

    def open(self) -> None:
        """What waits goes through."""
        self._open.set()
