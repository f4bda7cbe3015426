"""What the records of capabilities have in common: each kind that declares any has one, in its own contract's file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, runtime_checkable

from attrs import frozen

from turnwise.errors import Problem

Options = Any
"""The structured options of an implementation: an object of its own config class, which the core does not know; plain
options where it has none."""


@frozen
class Capabilities:
    """A frozen record of what an implementation can do beyond its contract's methods, or needs; every field has a
    default.

    The attribute `capabilities` holds it: on the implementation, as a class attribute; or on its config class, as a
    class attribute or a property, where options decide or where the implementation is heavy to import. A config class
    that has it speaks alone. The core reads it by turnwise.declared."""

    kind: ClassVar[str]


@runtime_checkable
class ChecksRun(Protocol):
    """A config class that judges its options together with the rest of the run."""

    def check(self, run: Any) -> Iterable[Problem]:  # Any: a RunConfig, which stands above the contracts
        """What is wrong, or has no effect, in `run` (turnwise.config.schema.RunConfig, which no contract may import):
        `path` is dotted from the options' own block on, or begins with `$.` and is dotted from the root. Called
        whenever the configuration is read, so it is arithmetic."""
        ...
