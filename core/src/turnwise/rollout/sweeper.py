"""One timer that enforces all timeouts: a timer per call would cost more than a turn may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Sweeper:
    """Calls `expire` of every watch whose time is over, within about a twentieth of the shortest timeout.

    Its clock counts the time in which the event loop was free: a call is not blamed for what blocked the loop. The
    timer runs only while something is watched.
    """

    def __init__(self, shortest: float) -> None:
        # Seconds. No shorter than 5 ms, which costs nothing yet, and no longer than 1 s.
        self.tick = min(max(shortest / 20, 0.005), 1.0)
        self.frozen = False
        """While it is, no time passes for what is watched."""
        self._clock = 0.0
        self._last = 0.0
        self._serial = 0
        self._watches: dict[int, tuple[float, Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, timeout: float, expire: Callable[[], None]) -> int:
        """Call `expire` after `timeout` seconds unless the returned key is released before."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._last = loop.time()
            self._timer = loop.call_later(self.tick, self._sweep, loop)
        self._serial += 1
        # One tick more: the clock stands still since the last sweep, and a call must not be blamed for that.
        self._watches[self._serial] = (self._clock + timeout + self.tick, expire)
        return self._serial

    def release(self, key: int) -> None:
        """Forget a watch (also one that has expired)."""
        self._watches.pop(key, None)

    def stop(self) -> None:
        """Drop the timer if nothing is watched."""
        if self._timer is not None and not self._watches:
            self._timer.cancel()
            self._timer = None

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        # Twice the tick at most: what is longer was a blocked loop.
        if not self.frozen:
            self._clock += min(now - self._last, 2 * self.tick)
        self._last = now
        for key, expire in [
            (key, expire) for key, (deadline, expire) in self._watches.items() if deadline <= self._clock
        ]:
            self.release(key)
            expire()
        self._timer = loop.call_later(self.tick, self._sweep, loop) if self._watches else None
