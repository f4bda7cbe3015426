"""The console logger: one line a step, one per evaluated tag, and below them a progress bar where the output is a
terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from turnwise.contracts.logger import LoggerContext
from turnwise.data.trajectory import Trajectory
from turnwise_console.config import ConsoleConfig
from turnwise_console.lines import duration, evaluation_lines, number, step_line

REWARD = "critic/score/mean"


class ConsoleLogger:
    """Prints what it is given when it is given it: how often that is (`logging_steps`) is the pipeline's choice."""

    def __init__(self, config: ConsoleConfig, context: LoggerContext, console: Console | None = None) -> None:
        self._console = console or Console()
        self._train_keys = tuple(key for key in config.keys if not key.startswith("val/"))
        self._val_keys = tuple(key for key in config.keys if key.startswith("val/"))
        self._max_steps = context.max_steps
        self._started, self._first_step = time.monotonic(), 0
        self._bar = self._make_bar(context) if config.progress and self._console.is_terminal else None

    def _make_bar(self, context: LoggerContext) -> Progress:
        columns = (
            # An experiment's name may hold square brackets, which rich would read as markup.
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}"),
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}"),
        )
        bar = Progress(*columns, console=self._console, transient=True)
        self._task = bar.add_task(context.exp_name, total=context.max_steps or None, reward="-", eta="-")
        bar.start()
        return bar

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of the step and those of an evaluation, whichever the metrics hold, and move the bar."""
        train = {name: value for name, value in metrics.items() if not name.startswith("val/")}
        val = {name: value for name, value in metrics.items() if name.startswith("val/")}
        for line in evaluation_lines(val, self._val_keys):
            self._print(f"eval {self._position(step)}", line, "bold cyan")
        shown = step_line(train, self._train_keys)
        if shown:
            # A step is logged when it has ended, so one more than its number is done.
            eta = self._eta(step + 1)
            # The bar has a column for the time left.
            self._print(
                f"step {self._position(step)}", shown if self._bar or not eta else f"{shown}  eta {eta}", "bold green"
            )
            self._advance(step + 1, train, eta)

    def _position(self, step: int) -> str:
        width = len(str(self._max_steps))
        return f"{step:>{width}}/{self._max_steps}" if self._max_steps else str(step)

    def _eta(self, done: int) -> str:
        """The time left at the mean pace since the start (or the resume) of this run; '' where the end is unknown."""
        if not self._max_steps or done <= self._first_step:
            return ""
        pace = (time.monotonic() - self._started) / (done - self._first_step)
        return duration(pace * max(0, self._max_steps - done))

    def _advance(self, done: int, train: Mapping[str, float], eta: str) -> None:
        if self._bar is None:
            return
        self._bar.update(self._task, completed=done, eta=eta or "-")
        if REWARD in train:
            self._bar.update(self._task, reward=number(REWARD, float(train[REWARD])))

    def _print(self, head: str, line: str, style: str) -> None:
        # Assembled, for rich would read the brackets of `score[tag]` in a plain string as markup.
        text = Text.assemble((head, style), "  ", line)
        # Unwrapped, because rich takes an output that is no terminal to be 80 columns wide.
        self._console.print(text, soft_wrap=True, highlight=False)

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        """Trajectories are not shown here; `turnwise rollout` prints some."""

    def artifact(self, step: int, name: str, path: Path) -> None:
        """Name the file that was made."""
        self._print(f"file {self._position(step)}", f"{name}: {path}", "bold")

    def resume(self, step: int) -> None:
        """Start the bar and the pace at `step`; what was printed stays."""
        self._started, self._first_step = time.monotonic(), step
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        if step:
            self._print(f"resume {self._position(step)}", "from a checkpoint", "bold")

    def close(self) -> None:
        """Remove the bar; may be called twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
