"""How far a run is, and what it remembers of the way; it travels in the checkpoints."""

from __future__ import annotations

from pathlib import Path

from attrs import define, field

from turnwise.errors import CheckpointError
from turnwise.pipeline.metrics import Reporting
from turnwise.pipeline.report import History
from turnwise.planning import resume


@define(eq=False)
class Progress:
    """How far a run is, also for whoever reads of its failure. `saved`: the newest checkpoint, which is after
    `saved_step` steps; `first`: the first step of this process, None until it can train."""

    saved: Path | None = None
    saved_step: int = -1
    first: int | None = None
    history: History = field(factory=History)
    reporting: Reporting = field(factory=Reporting)

    def take_up(self, start: resume.Checkpoint, max_steps: int) -> None:
        """The run goes on from here. Raises CheckpointError for a checkpoint after more steps than the run has."""
        if start.step > max_steps:
            raise CheckpointError(
                f"{start.folder} is after step {start.step}, max_steps is {max_steps}. Fix: raise max_steps."
            )
        self.saved, self.saved_step = start.folder, start.step
        self.history = History.from_plain(start.state["history"])
        self.reporting = Reporting.from_plain(start.state.get("reporting", ()))  # an earlier version kept none
