"""The options of the filters."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen
class TopSpreadConfig:
    """`keep`: the share of the groups that is kept, in (0, 1]; rounded up, so that at least one group trains."""

    keep: float = field(default=0.25, validator=[validators.gt(0.0), validators.le(1.0)])
