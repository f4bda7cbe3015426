"""What every engine's answer needs before it is ours: the text up to a stop string, a weight version for each token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from turnwise.contracts.inference import GeneratingArgs
from turnwise.errors import EngineError


def cut(text: str, args: GeneratingArgs) -> str:
    """The text up to its first stop string, with or without it."""
    found = [(place, string) for string in args.stop_strings if (place := text.find(string)) >= 0]
    if not found:
        return text
    # The earliest one; what begins at the same place ends with the shorter.
    place, string = min(found)
    return text[: place + len(string)] if args.include_stop_str_in_output else text[:place]


def version_number(label: Any) -> int:
    """An engine's version label as our number; whatever it held before our first update ("default") is 0."""
    return int(label) if str(label).isdecimal() else 0


def token_versions(spans: Iterable[tuple[Any, int, int]], count: int, engine: str, fix: str = "") -> np.ndarray:
    """int32 [count]: the version under which each token was sampled, from spans (label, start, end). Raises
    EngineError: a token has none."""
    # −1 marks tokens that no span covers: a span may be cut short, or be missing.
    versions = np.full(count, -1, np.int32)
    for label, start, end in spans:
        versions[start:end] = version_number(label)
    if (known := int((versions >= 0).sum())) != count:
        raise EngineError(
            f"{engine} reported the weight version of {known} of {count} tokens{f'. Fix: {fix}' if fix else ''}"
        )
    return versions
