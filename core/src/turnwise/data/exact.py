"""Episodes to bytes and back, exactly: every array with its dtype and shape, every number to the last bit, no pickle."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from attrs import define, field

from turnwise.data.trajectory import Sample, Trajectory, Turn

RECORDS = {cls.__name__: cls for cls in (Trajectory, Turn, Sample)}


@define
class _Writer:
    """Collects the bytes of the arrays; what it returns is JSON data that refers to them."""

    buffer: bytearray = field(factory=bytearray)

    def encode(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, str | bool | int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, where)
        if isinstance(value, list):
            return [self.encode(item, where) for item in value]
        if isinstance(value, tuple | frozenset | set):
            return {type(value).__name__: [self.encode(item, where) for item in value]}
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, Mapping):
            return {"dict": [[self.encode(k, where), self.encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        if type(value).__name__ in RECORDS:
            names = [a.name for a in attrs.fields(type(value))]
            return {type(value).__name__: {name: self.encode(getattr(value, name), f"{where}.{name}") for name in names}}
        raise TypeError(f"{where} is a {type(value).__name__}, which cannot be written exactly")

    def _array(self, value: Any, where: str) -> dict[str, Any]:
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError(f"{where} is an array of Python objects, which cannot be written exactly")
        start = len(self.buffer)
        self.buffer += array.tobytes()
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return {kind: [array.dtype.str, list(array.shape), start, len(self.buffer) - start]}


def encode(value: Any) -> tuple[bytes, bytes]:
    """(JSON text, bytes of the arrays) of plain data, arrays, trajectories, turns and samples. Raises TypeError for anything else."""
    writer = _Writer()
    text = json.dumps(writer.encode(value, "it")).encode()
    return text, bytes(writer.buffer)


def decode(text: bytes, buffer: bytes) -> Any:
    """Undo `encode`. Raises ValueError for text that it did not write."""
    try:
        return _decoded(json.loads(text), buffer)
    except (KeyError, IndexError, TypeError, StopIteration) as error:
        raise ValueError(f"not written by encode: {error!r}") from error


def _decoded(value: Any, buffer: bytes) -> Any:
    if isinstance(value, list):
        return [_decoded(item, buffer) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind in ("array", "scalar"):
        dtype, shape, start, size = inner
        array = np.frombuffer(buffer[start : start + size], dtype=dtype).reshape(shape).copy()
        return array if kind == "array" else array[()]
    if kind == "dict":
        return {_decoded(k, buffer): _decoded(v, buffer) for k, v in inner}
    if kind in RECORDS:
        return RECORDS[kind](**{name: _decoded(item, buffer) for name, item in inner.items()})
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return base64.b64decode(inner)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](_decoded(item, buffer) for item in inner)
