"""The options of the policy losses, under the names that are top-level keys of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from attrs import Attribute, field, frozen

from turnwise.contracts.env_manager import ManagerCapabilities
from turnwise.contracts.loss import LossCapabilities
from turnwise.declared import declared
from turnwise.errors import Problem


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

    capabilities: ClassVar[LossCapabilities] = LossCapabilities(clips=True)
    pg_clip: float = field(default=0.2, validator=_positive)
    pg_clip_low: float | None = field(default=None, validator=_positive)
    pg_clip_high: float | None = field(default=None, validator=_positive)
    dual_clip_loss: bool = False
    dual_clip_c: float | None = field(default=None, validator=_over_one)

    def check(self, run: Any) -> Iterator[Problem]:
        """A bound that nothing reads."""
        if self.dual_clip_c is not None and not self.dual_clip_loss:
            yield Problem(
                "dual_clip_c", "has no effect: dual_clip_loss is false. Fix: dual_clip_loss: true", warning=True
            )


@frozen
class VanillaConfig:
    """No options. Without a ratio, more than one update a step is off-policy without correction."""

    capabilities: ClassVar[LossCapabilities] = LossCapabilities(uses_ratio=False)


@frozen
class TisConfig:
    """The ratio's bounds: 0 ≤ `tis_lower_bound` ≤ `tis_upper_bound`."""

    capabilities: ClassVar[LossCapabilities] = LossCapabilities()
    tis_lower_bound: float = field(default=0.0, validator=_not_negative)
    tis_upper_bound: float = field(default=1.0, validator=_positive)

    def __attrs_post_init__(self) -> None:
        if self.tis_lower_bound > self.tis_upper_bound:
            raise ValueError(f"tis_lower_bound {self.tis_lower_bound} is above tis_upper_bound {self.tis_upper_bound}")


@frozen
class ToprConfig:
    """`topr_sign`: by what a trajectory is positive, its mean `advantage` ≥ 0 or its `score` > 0; `topr_weight_*`: the
    weight of each side."""

    capabilities: ClassVar[LossCapabilities] = LossCapabilities()
    topr_sign: Literal["advantage", "score"] = "advantage"
    topr_weight_pos: float = field(default=1.0, validator=_not_negative)
    topr_weight_neg: float = field(default=1.0, validator=_not_negative)


@frozen
class CispoConfig:
    """How far below and above 1 the weight may lie (ROLL: .1 and .1)."""

    capabilities: ClassVar[LossCapabilities] = LossCapabilities()
    # With 1 below, only the upper bound acts: a ratio is never negative.
    cispo_epsilon_low: float = field(default=1.0, validator=_not_negative)
    cispo_epsilon_high: float = field(default=4.0, validator=_not_negative)


@frozen
class Kimi15Config:
    """`kimi15_tau`: strength of the pull to the old policy."""

    capabilities: ClassVar[LossCapabilities] = LossCapabilities(own_ratio=True)
    kimi15_tau: float = field(default=0.1, validator=_not_negative)


@frozen
class GspoConfig:
    """`gspo_level`: a ratio per `segment` (turn) or per `sample` (row)."""

    capabilities: ClassVar[LossCapabilities] = LossCapabilities(own_ratio=True)
    # Means over a whole turn lie much closer to 1 than tokens' ratios do: the paper's bounds.
    gspo_clip_low: float = field(default=3e-4, validator=_positive)
    gspo_clip_high: float = field(default=4e-4, validator=_positive)
    gspo_level: Literal["segment", "sample"] = "segment"

    def check(self, run: Any) -> Iterator[Problem]:
        """A ratio per row depends on how rows are cut."""
        for tag, env in run.custom_envs.items() if self.gspo_level == "sample" else ():
            if declared(ManagerCapabilities, env.env_manager.name, env.env_manager.config).joins_turns:
                text = (
                    f"sample: the env_manager of {tag} joins turns into rows, and a ratio per row makes the loss depend"
                    " on how well turns join"
                )
                yield Problem("gspo_level", f"{text}. Fix: gspo_level: segment", warning=True)


@frozen
class GmpoConfig:
    """`gmpo_clip`: the bound of a token's log-ratio."""

    capabilities: ClassVar[LossCapabilities] = LossCapabilities(own_ratio=True)
    gmpo_clip: float = field(default=0.4, validator=_positive)


@frozen
class SapoConfig:
    """Temperature of the gate for positive advantages and for the others."""

    capabilities: ClassVar[LossCapabilities] = LossCapabilities()
    sapo_tau_pos: float = field(default=1.0, validator=_positive)
    sapo_tau_neg: float = field(default=1.05, validator=_positive)


@frozen
class DppoConfig:
    """`dppo_mask`: the divergence; `dppo_delta`: the trust region, by default .2 for `binary_tv` and .05 for
    `binary_kl`."""

    capabilities: ClassVar[LossCapabilities] = LossCapabilities(own_ratio=True, needs_infer_log_probs=True)
    dppo_mask: Literal["binary_tv", "binary_kl"] = "binary_tv"
    dppo_delta: float | None = field(default=None, validator=_positive)

    @property
    def delta(self) -> float:
        """δ, the default of the chosen mask filled in."""
        return self.dppo_delta if self.dppo_delta is not None else 0.05 if self.dppo_mask == "binary_kl" else 0.2
