"""Options of the players."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from turnwise.errors import ConfigError


def _holds_action(instance: Any, attribute: Any, value: str) -> None:
    if "{action}" not in value:
        raise ConfigError(
            f"template: {value!r} of a player does not hold {{action}}, so every answer would be the same. Fix: such as '<answer>{{action}}</answer>'"
        )


@frozen
class RandomConfig:
    """`template`: the answer's text; `{action}` stands for the chosen action."""

    template: str = field(default="{action}", validator=_holds_action)


@frozen
class HumanConfig:
    """`template`: the answer's text; `{action}` stands for the typed line. `show`: how many of the last messages are printed."""

    template: str = field(default="{action}", validator=_holds_action)
    show: int = 2
