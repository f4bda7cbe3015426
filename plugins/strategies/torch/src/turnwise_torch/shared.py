"""Models shared inside one process: the trainer publishes its module, a sampler looks it up, one lock keeps step and
decoding apart."""

from __future__ import annotations

import itertools
import threading

from attrs import field, frozen
from torch import nn

from turnwise.errors import EngineError, listed


@frozen(eq=False)
class SharedModel:
    """A published module. Whoever reads its weights for a decoding step, or writes them, holds `lock` meanwhile."""

    model: nn.Module
    lock: threading.Lock = field(factory=threading.Lock)


_published: dict[str, SharedModel] = {}
# A key is never used twice: one that was withdrawn must not find a later model.
_serial = itertools.count(1)


def publish(model: nn.Module) -> str:
    """Make `model` known to this process; the key finds it (and one lock) until `withdraw`."""
    key = f"shared-{next(_serial)}"
    _published[key] = SharedModel(model)
    return key


def lookup(key: str) -> SharedModel:
    """The published model. Raises EngineError for a key that this process does not know."""
    if key not in _published:
        raise EngineError(
            f"no shared model {key!r} in this process. Published: {listed(_published)}. "
            "Fix: train and sample in one process (runtime: local), or use another transport"
        )
    return _published[key]


def withdraw(key: str) -> None:
    """Forget a published model; an unknown key is ignored, so that closing twice is allowed."""
    _published.pop(key, None)
