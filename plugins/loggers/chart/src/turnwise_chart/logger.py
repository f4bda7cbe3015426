"""The chart logger: keeps the points of a few metrics and draws them as one PNG."""

from __future__ import annotations

import fnmatch
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.contracts.logger import LoggerCapabilities, LoggerContext
from turnwise.data.trajectory import Trajectory
from turnwise_chart.config import ChartConfig


class ChartLogger:
    """Writes `curves.png`, and its points as `curves.json`, so that a resumed run draws the whole curve."""

    capabilities = LoggerCapabilities(pictures=("curves.png",))

    def __init__(self, config: ChartConfig, context: LoggerContext) -> None:
        self._config = config
        self._title = context.exp_name
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._data = context.folder / "curves.json"
        self._picture = context.folder / self.capabilities.pictures[0]
        self._logged = 0

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep what the panels show; NaN and infinities leave a gap."""
        for name, value in metrics.items():
            if math.isfinite(value) and any(
                fnmatch.fnmatchcase(name, p) for panel in self._config.panels for p in panel
            ):
                self._points.setdefault(name, []).append((step, float(value)))
        self._logged += 1
        if self._logged % self._config.every == 0:
            self._draw()

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        """Trajectories are not drawn."""

    def artifact(self, step: int, name: str, path: Path) -> None:
        """Files are not drawn."""

    def resume(self, step: int) -> None:
        """Read the points before `step` back; at step 0 there are none."""
        self._points = {}
        if step > 0 and self._data.exists():
            for name, points in json.loads(self._data.read_text()).items():
                # The steps from the checkpoint on are played again, and logged again.
                self._points[name] = [(s, v) for s, v in points if s < step]

    def close(self) -> None:
        """Draw the picture a last time; may be called twice."""
        if self._points:
            self._draw()

    def _draw(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._picture.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._data.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._points))
        # In one move: a run that is killed here keeps the points of before, which a resumed run reads.
        os.replace(temporary, self._data)
        panels = [names for names in (self._names(panel) for panel in self._config.panels) if names]
        figure = Figure(figsize=(9, 2.4 * max(1, len(panels))), layout="constrained")
        # Not by pyplot, which keeps every figure that it makes and looks for a display.
        FigureCanvasAgg(figure)
        figure.suptitle(self._title)
        for number, names in enumerate(panels):
            self._panel(figure.add_subplot(len(panels), 1, number + 1), names)
        figure.savefig(self._picture, dpi=110)

    def _names(self, panel: tuple[str, ...]) -> list[str]:
        return [name for pattern in panel for name in self._points if fnmatch.fnmatchcase(name, pattern)]

    def _panel(self, axes: Any, names: list[str]) -> None:
        for name in names:
            steps, values = zip(*self._points[name], strict=True)
            # a line between two evaluations would look like a curve that nobody measured
            style = "none" if len(steps) < 3 else "-"
            axes.plot(steps, values, label=name, linestyle=style, marker="o" if len(steps) < 30 else None, markersize=4)
        axes.legend(loc="best", fontsize=8)
        axes.grid(alpha=0.3)
        axes.set_xlabel("step")
