"""The clocks of a process, which can be put forward: what is played then is played at another time, without waiting."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_Datetime = datetime.datetime


class Clocks:
    """What Python's modules `time` and `datetime` tell, `ahead` seconds later than it is."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def forward(self, seconds: float) -> None:
        """It is so much later from now on."""
        self.ahead += seconds

    def install(self) -> None:
        """For all that is imported afterwards, so in a process of its own: `from time import time` keeps what stood
        there before."""
        for name in CLOCKS:
            seconds, nanoseconds = getattr(time, name), getattr(time, f"{name}_ns")
            setattr(time, name, lambda read=seconds: read() + self.ahead)
            setattr(time, f"{name}_ns", lambda read=nanoseconds: read() + int(self.ahead * 1e9))
        for name in ("localtime", "gmtime", "ctime"):
            setattr(time, name, _of_now(getattr(time, name)))
        # Its `today`, and that of `date`, ask time.time.
        datetime.datetime = _Later  # type: ignore[misc]


def _of_now(show: Callable[[float], Any]) -> Callable[..., Any]:
    return lambda seconds=None: show(time.time() if seconds is None else seconds)


class _AnyDatetime(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _Datetime)


class _Later(_Datetime, metaclass=_AnyDatetime):
    """`datetime.datetime`, whose own `now` asks the system and no module."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        """That of time.time."""
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> Any:
        """Likewise, without a time zone."""
        return cls.now(datetime.UTC).replace(tzinfo=None)
