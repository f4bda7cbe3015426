"""The options of the walker."""

from __future__ import annotations

from attrs import field, frozen

from turnwise.errors import ConfigError


def _holds_the_action(instance: object, attribute: object, value: str) -> None:
    if "{action}" not in value:
        raise ConfigError(
            f"template is {value!r}, frozen_lake_walker; the placeholder {{action}} is missing. Fix: template: '<answer>{{action}}</answer>'."
        )


@frozen
class WalkerConfig:
    """`template`: the text of a response, `{action}` replaced by the direction (as `<answer>{action}</answer>` beside an `action_pattern`)."""

    template: str = field(default="{action}", validator=_holds_the_action)
