"""The options of `gae`; top-level keys of the same names reach it."""

from __future__ import annotations

from attrs import field, frozen, validators

from turnwise.data.normalise import RewardNormalization


@frozen
class GaeConfig:
    """Options of `gae`.

    `gamma`, `lambd`: the discount γ and the λ of the recursion, per sampled token, each in [0, 1].
    `reward_normalization`: how token rewards are normalised first; None: `identity`.
    """

    gamma: float = field(default=1.0, validator=[validators.ge(0.0), validators.le(1.0)])
    lambd: float = field(default=0.95, validator=[validators.ge(0.0), validators.le(1.0)])
    reward_normalization: RewardNormalization | None = None
