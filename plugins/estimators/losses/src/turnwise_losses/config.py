"""The options of the policy losses, under the names that are top-level keys of the configuration."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from attrs import Attribute, field, frozen


def _positive(instance: Any, attribute: Attribute[Any], value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{attribute.name} must be positive, got {value}")


def _over_one(instance: Any, attribute: Attribute[Any], value: float | None) -> None:
    if value is not None and value <= 1:
        raise ValueError(f"{attribute.name} must be greater than 1, got {value}")


def _not_negative(instance: Any, attribute: Attribute[Any], value: float | None) -> None:
    if value is not None and value < 0:
        raise ValueError(f"{attribute.name} must not be negative, got {value}")


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


@frozen
class TisConfig:
    """The ratio's bounds: 0 ≤ `tis_lower_bound` ≤ `tis_upper_bound`."""

    tis_lower_bound: float = field(default=0.0, validator=_not_negative)
    tis_upper_bound: float = field(default=1.0, validator=_positive)

    def __attrs_post_init__(self) -> None:
        if self.tis_lower_bound > self.tis_upper_bound:
            raise ValueError(f"tis_lower_bound {self.tis_lower_bound} is above tis_upper_bound {self.tis_upper_bound}")


@frozen
class ToprConfig:
    """`topr_sign`: by what a trajectory is positive, its mean `advantage` ≥ 0 or its `score` > 0; `topr_weight_*`: the weight of each side."""

    topr_sign: Literal["advantage", "score"] = "advantage"
    topr_weight_pos: float = field(default=1.0, validator=_not_negative)
    topr_weight_neg: float = field(default=1.0, validator=_not_negative)


@frozen
class CispoConfig:
    """How far below and above 1 the weight may lie (ROLL: .1 and .1)."""

    cispo_epsilon_low: float = field(default=1.0, validator=_not_negative)
    cispo_epsilon_high: float = field(default=4.0, validator=_not_negative)


@frozen
class Kimi15Config:
    """`kimi15_tau`: strength of the pull to the old policy."""

    own_ratio: ClassVar[bool] = True
    kimi15_tau: float = field(default=0.1, validator=_not_negative)


@frozen
class GspoConfig:
    """`gspo_level`: a ratio per `segment` (turn) or per `sample` (row). `own_ratio`: `ratio_type` has no effect."""

    own_ratio: ClassVar[bool] = True
    gspo_clip_low: float = field(default=3e-4, validator=_positive)
    gspo_clip_high: float = field(default=4e-4, validator=_positive)
    gspo_level: Literal["segment", "sample"] = "segment"

    @property
    def depends_on_rows(self) -> bool:
        """Whether merging turns into one row changes the loss."""
        return self.gspo_level == "sample"


@frozen
class GmpoConfig:
    """`gmpo_clip`: the bound of a token's log-ratio."""

    own_ratio: ClassVar[bool] = True
    gmpo_clip: float = field(default=0.4, validator=_positive)


@frozen
class SapoConfig:
    """Temperature of the gate for positive advantages and for the others."""

    sapo_tau_pos: float = field(default=1.0, validator=_positive)
    sapo_tau_neg: float = field(default=1.05, validator=_positive)


@frozen
class DppoConfig:
    """`dppo_mask`: the divergence; `dppo_delta`: the trust region, by default .2 for `binary_tv` and .05 for `binary_kl`."""

    own_ratio: ClassVar[bool] = True
    needs_infer_log_probs: ClassVar[bool] = True
    dppo_mask: Literal["binary_tv", "binary_kl"] = "binary_tv"
    dppo_delta: float | None = field(default=None, validator=_positive)

    @property
    def delta(self) -> float:
        """δ, the default of the chosen mask filled in."""
        return self.dppo_delta if self.dppo_delta is not None else 0.05 if self.dppo_mask == "binary_kl" else 0.2
