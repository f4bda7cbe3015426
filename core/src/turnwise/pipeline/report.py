"""The report at the end of a run: evaluation before and after beside the baselines, metrics out of their healthy range, what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import define, field

from turnwise.config.schema import RunConfig
from turnwise.pipeline.metrics import HEALTHY

SECTIONS = {
    "policy/approx_kl": "The policy moves too far",
    "policy/clip_frac": "The policy moves too far",
    "policy/entropy": "Entropy collapses",
    "policy/learning_rate": "The learning rate is 0",
}
"""Metric → the section of docs/troubleshooting.md that says more."""


@define
class History:
    """What the report needs of a run; it travels in the checkpoints, so that a resumed run reports the whole."""

    evaluations: dict[int, dict[str, float]] = field(factory=dict)
    baselines: dict[str, dict[str, float]] = field(factory=dict)
    last: dict[str, float] = field(factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """JSON data."""
        return {"evaluations": {str(k): v for k, v in self.evaluations.items()}, "baselines": self.baselines, "last": self.last}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> History:
        """Undo `to_plain`."""
        evaluations = {int(k): dict(v) for k, v in data["evaluations"].items()}
        return cls(evaluations, {k: dict(v) for k, v in data["baselines"].items()}, dict(data["last"]))


def write(folder: Path, config: RunConfig, history: History, saved: Path | None) -> str:
    """Write `report.md` into the run's folder and return its text (Markdown)."""
    parts = [f"# {config.exp_name}: {config.max_steps} steps"]
    if history.evaluations:
        parts.append(_evaluation_table(history))
    marks = unhealthy(history.last)
    if marks:
        parts.append("Outside their healthy range at the end:\n" + "\n".join(f"- {line}" for line in marks))
    if saved is not None:
        parts.append(f"Checkpoint: {saved} (a Hugging Face folder: {saved / 'model'})")
    text = "\n\n".join(parts) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text


def unhealthy(values: Mapping[str, float]) -> list[str]:
    """One line of advice for every metric outside its healthy range."""
    lines = []
    for name, (low, high, advice) in HEALTHY.items():
        value = values.get(name)
        if value is not None and not low <= value <= high:
            more = f" (docs/troubleshooting.md: {SECTIONS[name]})" if name in SECTIONS else ""
            lines.append(f"{name} = {value:.4g}: {advice}{more}")
    return lines


def _evaluation_table(history: History) -> str:
    """Rows: before, after, every baseline; columns: success and mean score per tag."""
    first, last = min(history.evaluations), max(history.evaluations)
    rows = [(f"model at step {first}", history.evaluations[first])]
    if last != first:
        rows.append((f"model at step {last}", history.evaluations[last]))
    rows += list(history.baselines.items())
    wanted = ("success", "score/mean", "turns/mean")
    columns = [n for n in rows[0][1] if n.startswith("val/") and n.count("/") >= 2 and n.split("/", 2)[2] in wanted]
    lines = ["| player | " + " | ".join(c.removeprefix("val/") for c in columns) + " |", "|---|" + "---:|" * len(columns)]
    for name, values in rows:
        cells = [f"{values[c]:.3f}" if c in values else "–" for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
