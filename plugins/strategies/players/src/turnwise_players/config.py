"""Options of the human player."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen
class HumanConfig:
    """`show`: how many of the last messages are printed."""

    show: int = field(default=2, validator=validators.ge(1))
