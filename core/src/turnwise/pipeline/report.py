"""The report at the end of a run: evaluation before and after beside the baselines, the learning rate, metrics out of
their healthy range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import define, field

from turnwise.config.schema import RunConfig
from turnwise.contracts.logger import LoggerCapabilities
from turnwise.declared import declared
from turnwise.errors import PluginError
from turnwise.pipeline.health import unhealthy

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
"""Columns of the picture of the learning rate."""
ROWS = 9
"""Lines of its table."""
BALANCED = 0.1
"""Share of the time for which a side may wait without a word on what to turn."""
WAITS = ("time/step", "time/trainer_idle", "time/sampler_idle")


@define
class History:
    """What the report needs of a run; it travels in the checkpoints, so that a resumed run reports the whole."""

    evaluations: dict[int, dict[str, float]] = field(factory=dict)
    baselines: dict[str, dict[str, float]] = field(factory=dict)
    last: dict[str, float] = field(factory=dict)
    first: dict[str, float] = field(factory=dict)
    """The first value of every metric."""
    rates: dict[int, list[float]] = field(factory=dict)
    """Pipeline step → number of updates, learning rate of the first and of the last of them."""
    waits: dict[str, float] = field(factory=dict)
    """Sums of WAITS over the steps in which both sides of asynchronous training had work."""

    def note(self, values: Mapping[str, float], *, ahead: bool = False) -> None:
        """The metrics of a step. `ahead`: there was a later one to play meanwhile."""
        # The older value wins: a metric may appear later than the first step.
        self.first = {**values, **self.first}
        self.last.update(values)
        # The last r steps have nothing to play beside them: their idleness says nothing of what to turn.
        if ahead and "time/trainer_idle" in values:
            self.waits = {name: self.waits.get(name, 0.0) + values.get(name, 0.0) for name in WAITS}

    def trained(self, step: int, rates: Sequence[float]) -> None:
        """The learning rates of a step's updates; of a step without one nothing is kept."""
        if rates:
            self.rates[step] = [len(rates), rates[0], rates[-1]]

    def to_plain(self) -> dict[str, Any]:  # Any: JSON data
        """JSON data."""
        return {
            "evaluations": {str(k): v for k, v in self.evaluations.items()},
            "baselines": self.baselines,
            "last": self.last,
            "first": self.first,
            "rates": {str(k): v for k, v in self.rates.items()},
            "waits": self.waits,
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> History:  # Any: as `to_plain`
        """Undo `to_plain`; a checkpoint of an earlier version knows neither first values nor rates."""
        return cls(
            evaluations={int(k): dict(v) for k, v in data["evaluations"].items()},
            baselines={k: dict(v) for k, v in data["baselines"].items()},
            last=dict(data["last"]),
            first=dict(data.get("first", {})),
            rates={int(k): list(v) for k, v in data.get("rates", {}).items()},
            waits=dict(data.get("waits", {})),
        )


def write(folder: Path, config: RunConfig, history: History, saved: Path | None) -> str:
    """Write `report.md` into the run's folder and return its text (Markdown)."""
    parts = [f"# {config.exp_name}: {config.max_steps} steps"]
    if history.evaluations:
        parts.append(_evaluation_table(history))
    if history.rates:
        parts.append(_learning_rate(history.rates))
    parts += [f"![{name}]({name})" for name in _pictures(config)]
    if waits := who_waits(history.waits):
        parts.append(waits)
    marks = unhealthy(
        history.last, config, history.first, max((max(r[1:]) for r in history.rates.values()), default=None)
    )
    if marks:
        parts.append("Outside their healthy range at the end:\n" + "\n".join(f"- {line}" for line in marks))
    if saved is not None:
        parts.append(f"Checkpoint: {saved} (a Hugging Face folder: {saved / 'model'})")
    text = "\n\n".join(parts) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text


def who_waits(waits: Mapping[str, float]) -> str:
    """Which side of asynchronous training waited for which, of the sums of `History.waits`, and what to turn; empty for
    none."""
    step, trainer, sampler = (waits.get(name, 0.0) for name in WAITS)
    if not step > 0:
        return ""
    shares = (
        f"While there was a batch to play ahead, the trainer was idle for {min(1.0, trainer / step):.0%} of the time,"
        f" the sampler for {min(1.0, sampler / step):.0%}."
    )
    if max(trainer, sampler) < BALANCED * step:
        return shares
    if trainer > sampler:
        return (
            f"{shares} The trainer waits: more sampling engines or environments would help, a larger ratio would not."
        )
    return f"{shares} The sampler waits: the trainer is the slower side, and a larger ratio would not help."


def _learning_rate(rates: Mapping[int, Sequence[float]]) -> str:
    """A picture and a table of the rates that the updates had."""
    steps = sorted(rates)
    updates = sum(int(rates[p][0]) for p in steps)
    # Evenly spread, and the largest wherever it is.
    shown = sorted(
        {steps[round(i * (len(steps) - 1) / (ROWS - 1))] for i in range(ROWS)}
        | {max(steps, key=lambda p: max(rates[p][1:]))}
    )
    lines = [
        f"Learning rate of {updates:,} updates in {len(steps):,} steps, {min(min(rates[p][1:]) for p in steps):.4g} to "
        f"{max(max(rates[p][1:]) for p in steps):.4g}:",
        f"\n    {sparkline([(rates[p][1] + rates[p][2]) / 2 for p in steps])}\n",
        "| step | updates | first rate | last rate |",
        "|---:|---:|---:|---:|",
        *(f"| {p:,} | {int(rates[p][0]):,} | {rates[p][1]:.4g} | {rates[p][2]:.4g} |" for p in shown),
    ]
    return "\n".join(lines)


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """At most `width` bars from 0 to the largest of `values` (not negative, at least one), each the mean of
    neighbours."""
    columns = min(width, len(values))
    cuts = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    top = max(means)
    return "".join(BARS[min(len(BARS) - 1, int(len(BARS) * mean / top))] if top > 0 else BARS[0] for mean in means)


def _pictures(config: RunConfig) -> list[str]:
    """What the chosen loggers say they draw into the run's folder (LoggerCapabilities)."""
    names: list[str] = []
    for choice in config.track_with:
        try:
            names += declared(LoggerCapabilities, choice.name, choice.config).pictures
        except PluginError:
            continue
    return names


def _evaluation_table(history: History) -> str:
    """Rows: before, after, every baseline; columns: success and mean score per tag."""
    first, last = min(history.evaluations), max(history.evaluations)
    rows = [(f"model at step {first}", history.evaluations[first])]
    if last != first:
        rows.append((f"model at step {last}", history.evaluations[last]))
    rows += list(history.baselines.items())
    wanted = ("success", "score/mean", "turns/mean")
    columns = [n for n in rows[0][1] if n.startswith("val/") and n.count("/") >= 2 and n.split("/", 2)[2] in wanted]
    lines = [
        "| player | " + " | ".join(c.removeprefix("val/") for c in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, values in rows:
        cells = [f"{values[c]:.3f}" if c in values else "–" for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
