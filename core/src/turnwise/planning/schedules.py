"""The learning rate as a function of progress through the pipeline: base·λ(p + k/n), whatever the number of updates a
step takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from attrs import field, frozen

from turnwise.config.schema import TrainingArgs
from turnwise.errors import ConfigError, Problem, did_you_mean, listed


@frozen
class Progress:
    """Where an update stands: `x` pipeline steps done of `total`, `warmup` of them warm-up; `base`, the rate that λ
    multiplies."""

    x: float
    total: int
    warmup: int
    base: float

    @property
    def decayed(self) -> float:
        """The share of the steps after warm-up that is done."""
        return (self.x - self.warmup) / max(1, self.total - self.warmup)


def _constant(at: Progress) -> float:
    return 1.0


def _linear(at: Progress) -> float:
    return max(0.0, (at.total - at.x) / max(1, at.total - at.warmup))


def _cosine(at: Progress, *, num_cycles: float = 0.5) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * at.decayed)))


def _cosine_with_min_lr(
    at: Progress, *, num_cycles: float = 0.5, min_lr: float | None = None, min_lr_rate: float | None = None
) -> float:
    # `min_lr` is a rate, and a multiplier is a share of one.
    floor = min_lr / at.base if min_lr is not None else float(min_lr_rate or 0.0)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * at.decayed)) * (1.0 - floor) + floor)


def _polynomial(at: Progress, *, lr_end: float = 1e-7, power: float = 1.0) -> float:
    return ((at.base - lr_end) * (1.0 - at.decayed) ** power + lr_end) / at.base


def _inverse_sqrt(at: Progress, *, timescale: float | None = None) -> float:
    # As in transformers.
    timescale = timescale or at.warmup or 10_000
    return 1.0 / math.sqrt((at.x + timescale - at.warmup) / timescale)


def _warmup_stable_decay(
    at: Progress,
    *,
    num_decay_steps: float,
    num_stable_steps: float | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    if at.x < at.warmup:
        risen = at.x / at.warmup
        shape = {
            "linear": risen,
            "cosine": 0.5 * (1.0 - math.cos(math.pi * risen)),
            "1-sqrt": 1.0 - math.sqrt(1.0 - risen),
        }[warmup_type]
        return max(0.0, shape * (1.0 - min_lr_ratio) + min_lr_ratio)
    stable = at.total - at.warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    if at.x < at.warmup + stable:
        return 1.0
    # The phases may be shorter than the run: it goes on at the lowest rate.
    if at.x >= at.warmup + stable + num_decay_steps:
        return min_lr_ratio
    fallen = (at.x - at.warmup - stable) / num_decay_steps
    wave = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * fallen))
    shape = {"linear": 1.0 - fallen, "cosine": wave, "1-sqrt": 1.0 - math.sqrt(fallen)}[decay_type]
    return max(0.0, shape * (1.0 - min_lr_ratio) + min_lr_ratio)


SCHEDULES: dict[str, tuple[Callable[..., float], tuple[str, ...]]] = {
    "constant": (_constant, ()),
    "constant_with_warmup": (_constant, ()),
    "linear": (_linear, ()),
    "cosine": (_cosine, ("num_cycles",)),
    "cosine_with_min_lr": (_cosine_with_min_lr, ("num_cycles", "min_lr", "min_lr_rate")),
    "polynomial": (_polynomial, ("lr_end", "power")),
    "inverse_sqrt": (_inverse_sqrt, ("timescale",)),
    "warmup_stable_decay": (
        _warmup_stable_decay,
        ("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}
"""Name → the multiplier and the keys that `lr_scheduler_kwargs` may hold, both as in transformers."""

ALIASES = {"wsd": "warmup_stable_decay"}
SHAPES = ("linear", "cosine", "1-sqrt")
# Schedules divide by them.
POSITIVE = ("timescale", "num_decay_steps")


def _canonical(name: str) -> str:
    return ALIASES.get(name, name)


@frozen
class Schedule:
    """A named schedule with its warm-up, both in pipeline steps. Raises ConfigError, all mistakes at once, for what it
    cannot be.

    `name`: one of `SCHEDULES` or `wsd`. `warmup_steps`: linear from rate 0 (`constant` has no warm-up, as in
    transformers; use `constant_with_warmup`). `kwargs`: `lr_scheduler_kwargs`.
    """

    name: str = field(default="constant", converter=_canonical)
    warmup_steps: int = 0
    kwargs: Mapping[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if problems := _problems(self):
            raise ConfigError([f"{problem.path}: {problem.text}" for problem in problems])

    def multiplier(self, x: float, max_steps: int, base: float | None = None) -> float:
        """λ(x) for 0 ≤ x < max_steps. `base`, the rate that λ multiplies, must be given for `polynomial` and for
        `min_lr`, whose end is a rate and not a share of one; ValueError without it."""
        if base is None and (self.name == "polynomial" or self.kwargs.get("min_lr") is not None):
            raise ValueError(
                f"the schedule {self.name} ends at a rate: its multiplier needs base, the learning rate that it"
                " multiplies"
            )
        shape, _ = SCHEDULES[self.name]
        at = Progress(float(x), max_steps, self.warmup_steps, 1.0 if base is None else base)
        if x < self.warmup_steps and self.name not in ("constant", "warmup_stable_decay"):
            # The shapes are those after warm-up; wsd alone has a warm-up of its own shape.
            return at.x / self.warmup_steps
        return shape(at, **self.kwargs)

    def check(self, base: float, max_steps: int) -> list[Problem]:
        """What fits neither this base rate nor this number of pipeline steps; paths are dotted from training_args on."""
        problems = list[Problem]()
        floor = "min_lr" if self.name == "cosine_with_min_lr" else "lr_end"
        rate = self.kwargs.get(floor, 1e-7 if self.name == "polynomial" else None)
        if rate is not None and not rate < base:
            problems.append(
                Problem(
                    f"lr_scheduler_kwargs.{floor}",
                    f"{rate} is not below learning_rate {base}. Fix: lower it, or raise learning_rate",
                )
            )
        # Where num_stable_steps is left out it is the rest, and always fits.
        phases = self.warmup_steps + self.kwargs.get("num_decay_steps", 0) + (self.kwargs.get("num_stable_steps") or 0)
        if self.name == "warmup_stable_decay" and phases > max_steps:
            text = f"warm-up, stable and decay phase take {phases} pipeline steps, and max_steps is {max_steps}"
            problems.append(Problem("lr_scheduler_kwargs", f"{text}. Fix: shorten a phase, or raise max_steps"))
        return problems


def learning_rate(base: float, schedule: Schedule, p: int, k: int, n_p: int, max_steps: int) -> float:
    """The rate of update `k` of the `n_p` updates (ppo_epochs included) of pipeline step `p`: base·λ(p + k/n_p)."""
    return base * schedule.multiplier(p + k / n_p, max_steps, base)


def warmup_steps_of(warmup_steps: int, warmup_ratio: float, max_steps: int) -> int:
    """Warm-up in pipeline steps: `warmup_steps`, or where that is 0 ceil(warmup_ratio·max_steps), with the ratio read
    as the decimal
    that was written: .07 of 100 steps are 7, not the 8 of binary fractions. Raises ConfigError for a ratio outside [0,
    1]."""
    if not 0 <= warmup_ratio <= 1:
        raise ConfigError(f"warmup_ratio: {warmup_ratio!r} is not in [0, 1]. Fix: such as 0.1")
    return warmup_steps or math.ceil(Fraction(repr(float(warmup_ratio))) * max_steps)


def _problems(schedule: Schedule) -> list[Problem]:
    if schedule.name not in SCHEDULES:
        known = [*SCHEDULES, *ALIASES]
        hint = did_you_mean(schedule.name, known)
        return [
            Problem(
                "lr_scheduler_type", f"{schedule.name!r} is unknown.{hint} Known: {listed(known)}. Fix: one of them"
            )
        ]
    problems = list[Problem]()
    if (
        not isinstance(schedule.warmup_steps, int)
        or isinstance(schedule.warmup_steps, bool)
        or schedule.warmup_steps < 0
    ):
        text = f"{schedule.warmup_steps!r} is not a whole number of pipeline steps. Fix: write one, such as 10"
        problems.append(Problem("warmup_steps", text))
    _, known_keys = SCHEDULES[schedule.name]
    for key, value in schedule.kwargs.items():
        where = f"lr_scheduler_kwargs.{key}"
        if key not in known_keys:
            hint = did_you_mean(key, known_keys)
            text = f"unknown for the schedule {schedule.name}.{hint} Known: {listed(known_keys)}. Fix: correct or remove it"
            problems.append(Problem(where, text))
        elif key in ("warmup_type", "decay_type"):
            if value not in SHAPES:
                hint = did_you_mean(str(value), SHAPES)
                problems.append(
                    Problem(where, f"{value!r} is unknown.{hint} Known: {listed(SHAPES)}. Fix: one of them")
                )
        elif problem := _number_problem(key, value):
            problems.append(Problem(where, f"{value!r} {problem}. Fix: correct the value"))
    return problems + _missing(schedule)


def _number_problem(key: str, value: Any) -> str | None:
    if value is None and key in ("min_lr", "min_lr_rate", "timescale", "num_stable_steps"):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "is not a number"
    if value < 0 or (value == 0 and key in POSITIVE):
        return "is negative" if value < 0 else "is not positive"
    if value > 1 and key in ("min_lr_rate", "min_lr_ratio"):
        return "is a share of the learning rate and above 1"
    return None


def _missing(schedule: Schedule) -> list[Problem]:
    given = {key for key, value in schedule.kwargs.items() if value is not None}
    if schedule.name == "cosine_with_min_lr" and len(given & {"min_lr", "min_lr_rate"}) != 1:
        text = "cosine_with_min_lr needs either min_lr or min_lr_rate. Fix: give exactly one"
        return [Problem("lr_scheduler_kwargs", text)]
    if schedule.name == "warmup_stable_decay" and "num_decay_steps" not in given:
        text = "warmup_stable_decay needs num_decay_steps, in pipeline steps. Fix: add num_decay_steps"
        return [Problem("lr_scheduler_kwargs", text)]
    return []


def schedule_of(args: TrainingArgs, max_steps: int) -> Schedule:
    """The learning-rate schedule of a role; warm-up in pipeline steps."""
    warmup = warmup_steps_of(args.warmup_steps, args.warmup_ratio, max_steps)
    return Schedule(args.lr_scheduler_type, warmup, dict(args.lr_scheduler_kwargs))
