"""From metrics to the readable line of a step or of an evaluation: pure functions over names and numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from attrs import frozen

LABELS = {
    "critic/score/mean": "score",
    "critic/reward/mean": "reward",
    "policy/loss": "loss",
    "policy/entropy": "entropy",
    "policy/approx_kl": "kl",
    "policy/kl": "ref_kl",
    "policy/learning_rate": "lr",
    "time/rollout": "roll",
    "time/actor_train": "train",
    "time/step": "time",
    "time/trainer_idle": "trainer idle",
    "time/sampler_idle": "sampler idle",
}


@frozen
class Shown:
    """One number of a line: its short label, the tag that a `*` stood for ('' without one), and its text."""

    label: str
    tag: str
    text: str


def number(name: str, value: float) -> str:
    """Four significant digits; seconds for a name under `time/`."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.1f}s" if name.startswith("time/") else f"{value:.4g}"


def idle(seconds: float, metrics: Mapping[str, float]) -> str:
    """The share of the step that somebody had nothing to do."""
    step = metrics.get("time/step", 0.0)
    return f"{min(1.0, seconds / step):.0%}" if step > 0 else number("time/", seconds)


def select(metrics: Mapping[str, float], keys: Iterable[str]) -> list[Shown]:
    """The metrics that `keys` name, in the order of `keys`, each metric once."""
    shown: dict[str, Shown] = {}
    for key in keys:
        pattern = re.compile("(.+?)".join(re.escape(part) for part in key.split("*")))
        for name, value in metrics.items():
            match = pattern.fullmatch(name)
            # Keys may overlap: the first that names a metric decides its place and label.
            if match and name not in shown:
                text = idle(float(value), metrics) if name.endswith("_idle") else number(name, float(value))
                shown[name] = Shown(_label(key, name), "/".join(match.groups()), text)
    return list(shown.values())


def _label(key: str, name: str) -> str:
    if "*" not in key:
        return LABELS.get(name, name)
    tail = key.rsplit("*", 1)[1].strip("/") or name
    return tail.removesuffix("/mean")


def step_line(metrics: Mapping[str, float], keys: Iterable[str]) -> str:
    """The numbers of a training step in columns; a tag is named only where two of them share a label. '' if there is
    nothing to show."""
    shown = select(metrics, keys)
    labels = [item.label for item in shown]
    cells = []
    for item in shown:
        label = f"{item.label}[{item.tag}]" if labels.count(item.label) > 1 else item.label
        cells.append(f"{label} {item.text:<9}")
    return " ".join(cells).rstrip()


def evaluation_lines(metrics: Mapping[str, float], keys: Iterable[str]) -> list[str]:
    """One line per evaluated tag."""
    by_tag: dict[str, list[str]] = {}
    for item in select(metrics, keys):
        by_tag.setdefault(item.tag, []).append(f"{item.label} {item.text:<9}")
    return [f"{tag}  {' '.join(cells).rstrip()}".lstrip() for tag, cells in by_tag.items()]


def duration(seconds: float) -> str:
    """`h:mm:ss`."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
