"""Checks of the options of `retrieval`: each returns the value as it is used, or raises ConfigError with the fix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from turnwise.errors import ConfigError, did_you_mean


def integer(name: str, value: Any, least: int, most: int) -> int:
    """An integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}, retrieval. Fix: an integer from {least} to {most}.")
    return value


def penalty(name: str, value: Any) -> float:
    """A finite number of at most 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > 0:
        raise ConfigError(
            f"{name} is {value!r}, retrieval; it is added to the reward. Fix: a number of at most 0, as -0.1."
        )
    return float(value)


def choice(name: str, value: Any, known: tuple[str, ...]) -> str:
    """One of `known`."""
    if value not in known:
        raise ConfigError(
            f"{name} is {value!r}, retrieval.{did_you_mean(str(value), known)} Fix: one of {', '.join(known)}."
        )
    return str(value)


def lengths(value: Any) -> tuple[int, int]:
    """(shortest, longest): 100 leaves room for the facts."""
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    whole = len(pair) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
    if not whole or not 100 <= pair[0] <= pair[1]:
        raise ConfigError(
            f"document_tokens is {value!r}, retrieval. Fix: shortest and longest, at least 100, as [100, 5000]."
        )
    return pair[0], pair[1]
