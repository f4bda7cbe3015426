"""Which files this process opens for writing, for the contract of what stays in its own folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_watching: list[set[Path]] = []
_hooked: list[bool] = []


@contextmanager
def writes() -> Iterator[set[Path]]:
    """The absolute paths of what is opened for writing, made, or moved to while the context is open, by Python code of
    any thread."""
    if not _hooked:
        sys.addaudithook(_heard)  # for good: a hook cannot be taken back
        _hooked.append(True)
    found: set[Path] = set()
    _watching.append(found)
    try:
        yield found
    finally:
        # By identity: two watches that have heard the same are equal sets, and `remove` would end the outer one.
        _watching[:] = [one for one in _watching if one is not found]


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    path = _written(event, arguments)
    if isinstance(path, str | bytes | os.PathLike):
        for found in _watching:
            found.add(Path(os.path.abspath(os.fsdecode(path))))


def _written(event: str, arguments: tuple[Any, ...]) -> Any:
    """The path that this event writes, None for none."""
    if event == "open":
        path, mode, flags = arguments
        writing = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if mode is None else set(mode) & set("wax+")
        return path if writing else None
    if event in ("os.rename", "os.link", "os.symlink"):
        return arguments[1]
    return arguments[0] if event in ("os.mkdir", "sqlite3.connect") else None
