"""The admissible range of a number, stated beside the key that it bounds: attrs metadata that one check and the
reference read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from attrs import frozen

RANGE = "range"
"""The metadata's key: `field(default=1.0, metadata={RANGE: SHARE})`."""


@frozen
class Range:
    """From `least` to `most`; `above` and `below`: without the ends themselves. Infinity is in no range, for nothing
    can be computed from it.

    `words`: for the reference and the message, after "must be"."""

    words: str
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def fault(self, value: float) -> str:
        """What is wrong with a number, or the empty string."""
        if math.isinf(value):
            return "must be finite"
        return "" if self.least <= value <= self.most and self.above < value < self.below else f"must be {self.words}"


@frozen
class FileName:
    """A path that file systems can hold."""

    words: str = "a path of at most 4,095 bytes, 255 a name"

    def fault(self, value: str) -> str:
        """What is wrong with a path, or the empty string."""
        # YAML can write half of a surrogate pair, which plain UTF-8 refuses by an exception.
        raw = value.encode("utf-8", "surrogatepass")
        return f"must be {self.words}" if len(raw) > 4095 or any(len(part) > 255 for part in raw.split(b"/")) else ""


FINITE = Range("finite")
POSITIVE = Range("positive", above=0)
NOT_NEGATIVE = Range("at least 0", least=0)
SHARE = Range("between 0 and 1", least=0, most=1)
TOP_P = Range("above 0 and at most 1 (1 switches it off)", above=0, most=1)
BELOW_ONE = Range("at least 0 and below 1", least=0, below=1)
SEED = Range("at least 0 and below 2^63", least=0, below=2**63)
PATH = FileName()


# Any: a configuration class, and paths and values within it
def faults(config: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, str]]:
    """(path, value, what is wrong) of every value below `config` that is outside the range stated beside its field."""
    if attrs.has(type(config)):
        for attribute in attrs.fields(type(config)):
            value, bounds = getattr(config, attribute.name), attribute.metadata.get(RANGE)
            here = (*path, attribute.name)
            wanted = str if isinstance(bounds, FileName) else (int, float)
            # A bool is an int to Python, and has no range.
            if bounds is not None and isinstance(value, wanted) and not isinstance(value, bool):
                if fault := bounds.fault(value):
                    yield here, value, fault
            else:
                yield from faults(value, here)
    elif isinstance(config, Mapping):
        for key, value in config.items():
            yield from faults(value, (*path, key))
    elif isinstance(config, list | tuple):
        for i, value in enumerate(config):
            yield from faults(value, (*path, i))
