"""Implementations that a test makes up, in this process's registry as long as the test lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from turnwise.hookspecs import Implementation
from turnwise.plugins import Entry, Registry, registry, reset_registry


@contextmanager
def registered(*records: tuple[str, Implementation], plugins: Sequence[str] = ()) -> Iterator[Registry]:
    """This process's registry with what is installed, the modules or files of `plugins`, and the (kind, implementation)
    of `records`, which belong to the distribution `turnwise-test`. All of it is forgotten at the end."""
    reset_registry()
    try:
        registry().declare(list(plugins))
        registry().add(*(made(kind, implementation) for kind, implementation in records))
        yield registry()
    finally:
        reset_registry()


def made(kind: str, implementation: Implementation) -> Entry:
    """The entry of an implementation that a test makes up."""
    return Entry(kind, implementation, "test", "turnwise-test", "1")
