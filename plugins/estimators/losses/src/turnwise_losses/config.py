"""The options of the policy losses, under the names that are top-level keys of the configuration."""

from __future__ import annotations

from typing import Any, ClassVar

from attrs import Attribute, field, frozen


def _positive(instance: Any, attribute: Attribute[Any], value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{attribute.name} must be positive, got {value}")


def _over_one(instance: Any, attribute: Attribute[Any], value: float | None) -> None:
    if value is not None and value <= 1:
        raise ValueError(f"{attribute.name} must be greater than 1, got {value}")


@frozen
class PpoConfig:
    """`pg_clip_low` and `pg_clip_high` default to `pg_clip`; `dual_clip_c` defaults to 1 + 2·`pg_clip`."""

    pg_clip: float = field(default=0.2, validator=_positive)
    pg_clip_low: float | None = field(default=None, validator=_positive)
    pg_clip_high: float | None = field(default=None, validator=_positive)
    dual_clip_loss: bool = False
    dual_clip_c: float | None = field(default=None, validator=_over_one)


@frozen
class VanillaConfig:
    """No options. `uses_ratio` tells the configuration that more than one update a step is off-policy without correction."""

    uses_ratio: ClassVar[bool] = False
