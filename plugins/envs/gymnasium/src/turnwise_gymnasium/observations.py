"""Values of Gymnasium's spaces as readable text, as an image, or as a key of the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from turnwise_gymnasium.grids import fields, grid_text, is_grid


def is_image(space: Any) -> bool:
    """Whether observations of this space are pictures: a uint8 Box of shape H×W×3."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == 3


def text_of(value: Any) -> str:
    """Numbers to four significant digits, vectors on a line, matrices one row a line, dictionaries one `name: value` a
    line, MiniGrid's observations as a map."""
    if is_grid(value):
        return grid_text(value)
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_nested(item)}" for name, item in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(_nested(item) for item in value)
    if isinstance(value, np.ndarray) and value.ndim:
        return ("\n" if value.ndim > 1 else ", ").join(text_of(row) for row in value)
    return _scalar(value.item() if isinstance(value, np.ndarray | np.generic) else value)


def field_texts(value: Any) -> dict[str, str]:
    """The text of every field of a dictionary; none of anything else."""
    if not isinstance(value, Mapping):
        return {}
    return {str(name): text_of(item) for name, item in value.items()} | (fields(value) if is_grid(value) else {})


def _nested(value: Any) -> str:
    text = text_of(value)
    if isinstance(value, Mapping | tuple | list) or (isinstance(value, np.ndarray) and value.ndim):
        return f"({text})"
    return text


def _scalar(value: Any) -> str:
    # + 0.0: a negative zero reads as 0.
    return f"{value + 0.0:.4g}" if isinstance(value, float) else str(value)


def is_discrete(space: Any) -> bool:
    """Whether the space has finitely many values: Discrete, MultiDiscrete, MultiBinary, and tuples or dictionaries of
    them."""
    if isinstance(space, spaces.Tuple):
        return all(is_discrete(part) for part in space.spaces)
    if isinstance(space, spaces.Dict):
        return all(is_discrete(part) for part in space.spaces.values())
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def key_of(value: Any) -> Any:
    """A hashable copy of a discrete observation: integers and tuples of them, dictionaries as sorted pairs."""
    if isinstance(value, Mapping):
        return tuple(sorted((name, key_of(item)) for name, item in value.items()))
    if isinstance(value, tuple | list):
        return tuple(key_of(item) for item in value)
    if isinstance(value, np.ndarray):
        # With the shape, for arrays of other shapes may hold the same numbers.
        return (*value.shape, *(int(x) for x in value.ravel()))
    return int(value)
