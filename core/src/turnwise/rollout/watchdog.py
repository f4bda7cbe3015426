"""Ends a wait in which nothing moves, with what waits for what."""

from __future__ import annotations

import asyncio
from collections import Counter

from turnwise.contracts.rollout import Executor
from turnwise.errors import TurnwiseError

SHOWN = 10
"""Episodes that the error names."""


class Watchdog:
    """Over one executor. It asks not whether requests are in flight, for those that hang are, too."""

    def __init__(self, executor: Executor, timeout: float) -> None:
        self._executor, self._timeout = executor, timeout

    async def wait(self, future: asyncio.Future[None]) -> None:
        """Until the future is done. Raises TurnwiseError: nothing moved for `timeout` seconds."""
        clock = asyncio.get_running_loop().time
        seen, since = self._executor.moved(), clock()
        while not future.done():
            # Not `wait_for`, which would cancel the future that others still set.
            await asyncio.wait([future], timeout=min(self._timeout / 10, 5.0))
            if (now := self._executor.moved()) != seen:
                seen, since = now, clock()
            elif not future.done() and clock() - since > self._timeout:
                raise TurnwiseError(self._stalled())

    def _stalled(self) -> str:
        lines = self._executor.waits()
        kinds = Counter(line.split(": ", 1)[1].split(", for ")[0] for line in lines)
        summary = ", ".join(f"{count} wait for {what}" for what, count in kinds.most_common())
        shown = "; ".join(lines[:SHOWN]) + (f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")
        return (
            f"nothing moved for stall_timeout = {self._timeout:g} s while {len(lines)} episodes are open"
            f" ({summary or 'none has begun'}). {shown}. Fix: look into what they wait for, or raise stall_timeout"
        )
