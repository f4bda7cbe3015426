"""Episodes to bytes and back, exactly: every array with its dtype and shape, every number to the last bit, no
pickle."""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import namedtuple
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import attrs
import numpy as np
from attrs import define, field

from turnwise.data.trajectory import Sample, Trajectory, Turn

# Beside namedtuples the only classes that are read back by name: what a file says must never choose what is called.
RECORDS = {cls.__name__: cls for cls in (Trajectory, Turn, Sample)}


@define
class _Writer:
    """Collects the bytes of the arrays; what it returns is JSON data that refers to them."""

    buffer: bytearray = field(factory=bytearray)

    def encode(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, str | bool | int):
            return value
        if isinstance(value, float):
            # JSON has neither NaN nor infinity.
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, where)
        if isinstance(value, list):
            return [self.encode(item, where) for item in value]
        # Before the plain tuple, of which a namedtuple is one.
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            named = type(value)
            return {
                "named": [
                    named.__module__,
                    named.__qualname__,
                    list(value._fields),
                    [self.encode(item, where) for item in value],
                ]
            }
        if isinstance(value, tuple | frozenset | set):
            kind = next(base.__name__ for base in (tuple, frozenset, set) if isinstance(value, base))
            return {kind: [self.encode(item, where) for item in value]}
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, Mapping):
            # Pairs, not a JSON object: keys need not be text, and keep their type.
            return {"dict": [[self.encode(k, where), self.encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        if type(value).__name__ in RECORDS:
            names = [a.name for a in attrs.fields(type(value))]
            return {
                type(value).__name__: {name: self.encode(getattr(value, name), f"{where}.{name}") for name in names}
            }
        raise TypeError(f"{where} is a {type(value).__name__}, which cannot be written exactly")

    def _array(self, value: Any, where: str) -> dict[str, Any]:
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError(f"{where} is an array of Python objects, which cannot be written exactly")
        start = len(self.buffer)
        self.buffer += array.tobytes()
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return {kind: [array.dtype.str, list(array.shape), start, len(self.buffer) - start]}


def encode(value: Any) -> tuple[bytes, bytes]:  # Any: plain data of any shape
    """(JSON text, bytes of the arrays) of plain data, arrays, trajectories, turns and samples. Raises TypeError for
    anything else.

    A namedtuple comes back as one, of its own class where that is loaded: states of two classes are two states,
    whatever they hold. What else derives from a plain type comes back as that type, equal to what it was."""
    writer = _Writer()
    text = json.dumps(writer.encode(value, "it")).encode()
    return text, bytes(writer.buffer)


def decode(text: bytes, buffer: bytes) -> Any:  # Any: plain data of any shape
    """Undo `encode`. Raises ValueError for text that it did not write."""
    try:
        return _decoded(json.loads(text), buffer)
    except (KeyError, IndexError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(f"not written by encode: {error!r}") from error


def _decoded(value: Any, buffer: bytes) -> Any:
    if isinstance(value, list):
        return [_decoded(item, buffer) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind in ("array", "scalar"):
        dtype, shape, start, size = inner
        # A copy, for frombuffer gives a view that cannot be written to.
        array = np.frombuffer(buffer[start : start + size], dtype=dtype).reshape(shape).copy()
        # A scalar has the shape (), and [()] takes it out with its dtype.
        return array if kind == "array" else array[()]
    if kind == "dict":
        return {_decoded(k, buffer): _decoded(v, buffer) for k, v in inner}
    if kind in RECORDS:
        return RECORDS[kind](**{name: _decoded(item, buffer) for name, item in inner.items()})
    if kind == "float":
        return float(inner)
    if kind == "named":
        module, name, fields, values = inner
        if len(fields) != len(values):
            raise ValueError(f"not written by encode: a {name} of {len(values)} values")
        # Past the class's own `__new__`, which may take other arguments than its fields.
        return tuple.__new__(_named(module, name, tuple(fields)), [_decoded(item, buffer) for item in values])
    if kind == "bytes":
        return base64.b64decode(inner)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](_decoded(item, buffer) for item in inner)


@lru_cache(maxsize=256)
def _named(module: str, name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """The class of a namedtuple if its module is loaded, for nothing is imported on a file's word; else one of the same
    name."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields:
        return found
    return namedtuple(name.rpartition(".")[2], fields)  # its fields are data
