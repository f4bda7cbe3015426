"""Options of an implementation without a config class, against the annotations of its constructor."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Literal, Union

from turnwise.config.convert import Problem, structure
from turnwise.importing import StrangerError, guarded

_PLAIN = (int, float, bool, str, type(None), FilePath)
_SHAPES = (list, tuple, set, frozenset, Sequence, dict, Mapping)


# Any: an environment's options are its own
def mistyped(target: Callable[..., Any], options: Mapping[str, Any]) -> list[Problem]:
    """What is of another type than its parameter's annotation, and where. An annotation that YAML cannot express, or
    that cannot be read, allows everything; null may be written where it is the default."""
    try:
        with guarded():  # an annotation is an expression of the plugin's
            parameters = inspect.signature(target, eval_str=True).parameters
    except StrangerError:
        return []
    return [
        ((name, *path), text)
        for name, value in options.items()
        if name in parameters and not (value is None and parameters[name].default is None)
        if _simple(parameters[name].annotation)
        for path, text in structure(parameters[name].annotation, value)[1]
    ]


def _simple(annotation: Any) -> bool:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return True
    if origin in (Union, types.UnionType) or origin in _SHAPES:
        return all(one is Any or one is Ellipsis or _simple(one) for one in args)
    return annotation in _PLAIN or annotation in _SHAPES
