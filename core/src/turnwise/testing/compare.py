"""What tests compare: values at any depth, the process's global random state, and what a message says."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np


def same(left: Any, right: Any) -> bool:
    """Equal in type of container, shape and value, at any depth; NaN equals NaN."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        a, b = np.asarray(left), np.asarray(right)
        # NaN equality is asked for by kind: numpy cannot tell it for texts and objects.
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right))
    # The one value that == does not find equal to itself, and a reward may be it.
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def global_random_state() -> dict[str, Any]:
    """The state of Python's, numpy's and (where it is loaded) torch's global generator."""
    state: dict[str, Any] = {"random": random.getstate(), "numpy.random": np.random.get_state()}
    # Asked for only where it is loaded: importing torch takes seconds, and most implementations do without it.
    torch = sys.modules.get("torch")
    return state if torch is None else state | {"torch": torch.get_rng_state().numpy().copy()}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The generators whose state differs."""
    return [name for name in before if not same(before[name], after[name])]


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Python's and numpy's global generators seeded with `seed`, and put back afterwards."""
    kept = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])


def says(line: str, *words: str) -> None:
    """Assert that a message holds what its reader needs, such as the key, the value that is wrong and the fix, and is
    one line; how it is worded is its own affair."""
    missing = [word for word in words if word not in line]
    assert not missing, f"{line!r} lacks {missing}"
    assert "\n" not in line, f"{line!r} is more than one line"
