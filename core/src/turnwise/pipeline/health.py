"""Which metrics lie outside their healthy range at the end of a run, and what to do about it; a range is reported only
where it means something."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import frozen

from turnwise.config.schema import RunConfig
from turnwise.config.updates import loss_capabilities
from turnwise.contracts.estimator import EstimatorContext
from turnwise.data.normalise import RewardNormalization
from turnwise.errors import TurnwiseError
from turnwise.planning import builders

COLLAPSED = 0.1
"""Entropy below this share of the first step's, without a better score to show for it, has collapsed."""


@frozen
class Range:
    """`lowest` ≤ value ≤ `highest` is healthy; `below` and `above` advise on the others, each with the section of
    docs/troubleshooting.md."""

    lowest: float
    highest: float
    below: tuple[str, str] = ("", "")
    above: tuple[str, str] = ("", "")

    def advice(self, value: float) -> tuple[str, str] | None:
        """(advice, section), or None for a healthy value. NaN is not healthy."""
        if self.lowest <= value <= self.highest:
            return None
        # NaN is neither: it gets whatever advice there is.
        return self.above if value > self.highest or not self.below[0] else self.below


TOO_FAR, TOO_SMALL, COLLAPSE = "The policy moves too far", "The loss does not fall", "Entropy collapses"
NOT_CENTRED = (
    "normalised rewards are not centred: count each trajectory once, and see reward_normalization",
    "Rewards are not centred",
)
HEALTHY: dict[str, Range] = {
    "policy/approx_kl": Range(
        -math.inf, 0.05, above=("the policy moves too far in a step: lower learning_rate or ppo_epochs", TOO_FAR)
    ),
    "policy/clip_frac": Range(
        0.1,
        0.3,
        (
            "few tokens reach the clip, so the updates are small: if the score stands still, raise learning_rate or"
            " ppo_epochs",
            TOO_SMALL,
        ),
        ("most tokens are clipped: lower learning_rate, or more groups per update", TOO_FAR),
    ),
    "policy/entropy": Range(
        0.1,
        math.inf,
        ("entropy collapses: raise entropy_loss_coef, lower learning_rate, or check the reward", COLLAPSE),
    ),
    "critic/reward/mean": Range(-0.1, 0.1, NOT_CENTRED, NOT_CENTRED),
    "policy/learning_rate": Range(
        math.nextafter(0.0, 1.0),
        math.inf,
        ("the last update learnt nothing: see `turnwise plan` for the schedule", "The learning rate is 0"),
    ),
}
"""Metric → its range, from docs/metrics.md."""
DOES_NOT_FIT = "The learning rate does not fit the model"
PRETRAINED_RATE = Range(
    5e-7,
    5e-6,
    ("low for a pretrained model: little is learnt in a step, raise learning_rate", DOES_NOT_FIT),
    ("high for a pretrained model: it may forget what it knew, lower learning_rate", DOES_NOT_FIT),
)
"""Of the largest rate of the run, for all weights of a model that was trained before."""


NO_SIGNAL = "Groups without signal"


def cause(values: Mapping[str, float]) -> str | None:
    """Why a step taught nothing, whatever the optimizer does: one line, or None. The first that holds explains those
    after it."""
    if values.get("group/all_correct_ratio", 0.0) >= 1:
        return _line(
            "group/all_correct_ratio = 1",
            "every episode succeeds and nothing is left to learn: harder tasks, or fewer steps",
            NO_SIGNAL,
        )
    invalid = [value for name, value in values.items() if name.startswith("env/") and name.endswith("/invalid_actions")]
    # The smallest: as long as one tag's answers hold actions, something is learnt.
    if invalid and min(invalid) >= 1:
        advice = (
            "no answer holds an action: look at some with `turnwise rollout`, and check how the manager finds it,"
            " max_new_tokens and the prompt"
        )
        return _line("invalid_actions = 1", advice, NO_SIGNAL)
    if values.get("group/advantage_diff/mean", math.nan) == 0:
        advice = (
            "the members of every group score alike, so there is nothing to compare: larger groups, easier tasks, or a"
            " finer reward"
        )
        return _line("group/advantage_diff/mean = 0", advice, NO_SIGNAL)
    return None


def unhealthy(
    values: Mapping[str, float],
    config: RunConfig | None = None,
    first: Mapping[str, float] | None = None,
    peak: float | None = None,
) -> list[str]:
    """One line of advice for every metric of `values` outside its healthy range; the cause first, where a step taught
    nothing.

    `config` leaves out what means nothing in the run; `first`: the metrics of its first step; `peak`: the largest
    learning rate used.
    """
    why = cause(values)
    lines = [] if why is None else [why]
    for name, healthy in HEALTHY.items():
        value = values.get(name)
        advice = (
            healthy.advice(value)
            if value is not None and (config is None or _applies(name, value, values, config))
            else None
        )
        # A higher rate makes nothing of no signal, so who has none is not advised to raise it.
        if advice is not None and not (why and advice[1] == TOO_SMALL):
            lines.append(_line(f"{name} = {value:.4g}", *advice))
        elif name == "policy/entropy" and _collapsed(values, first or {}):
            fell = f"{name} fell from {first[name]:.4g} to {value:.4g}"  # type: ignore[index]
            lines.append(
                _line(fell, "and the score did not rise: raise entropy_loss_coef, or lower learning_rate", COLLAPSE)
            )
    advice = PRETRAINED_RATE.advice(peak) if peak is not None and config is not None and _pretrained(config) else None
    if advice is not None and peak is not None and not (why and peak < PRETRAINED_RATE.lowest):
        lines.append(_line(f"learning rate up to {peak:.4g}", *advice))
    return lines


def _line(what: str, advice: str, section: str) -> str:
    return f"{what}: {advice} (docs/troubleshooting.md: {section})"


def _applies(name: str, value: float, values: Mapping[str, float], config: RunConfig) -> bool:
    if name == "policy/clip_frac":
        # The range is that of a clipped surrogate, and the first of a step's updates has nothing to clip.
        several = values.get("policy/updates", 0) > 1
        return loss_capabilities(config).clips and (several or value > HEALTHY[name].highest)
    return name != "critic/reward/mean" or _centres(config)


def _collapsed(values: Mapping[str, float], first: Mapping[str, float]) -> bool:
    before, now = first.get("policy/entropy", math.nan), values.get("policy/entropy", math.nan)
    # NaN where the score is missing: no comparison holds, and nothing is reported.
    score = values.get("critic/score/mean", math.nan) - first.get("critic/score/mean", math.nan)
    return now < COLLAPSED * before and score <= 0


def _centres(config: RunConfig) -> bool:
    """Whether the estimator, its own default included, subtracts a mean from the scores."""
    try:
        estimator = builders.build("advantage_estimator", config.adv_estimator, EstimatorContext(seed=config.seed))
    except TurnwiseError:
        # The run would have ended with it; a report never does.
        return False
    settings: RewardNormalization | None = estimator.normalization
    if settings is None or settings.grouping == "traj_id":
        return False
    if settings.norm_mean_type is not None or settings.norm_std_type is not None:
        return settings.norm_mean_type is not None
    return settings.method not in (None, "identity")


def _pretrained(config: RunConfig) -> bool:
    """A model by name, all of its weights trained: a recipe's are random, and adapters want other rates."""
    return isinstance(config.pretrain, str) and config.actor_train.model_args.lora_rank is None
