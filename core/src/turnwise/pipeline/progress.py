"""How far a run is, and what it remembers of the way; it travels in the checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from attrs import define, field

from turnwise.errors import CheckpointError, one_line
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
        state = start.state
        try:
            self.history = History.from_plain(state["history"])
            self.reporting = Reporting.from_plain(state.get("reporting", ()))  # an earlier version kept none
            # What is read of it later, when the roles are placed.
            if not math.isfinite(state["kl_coef"]):
                raise ValueError(f"kl_coef {state['kl_coef']}")
            for name, part in (("scheduler", state["scheduler"]), ("config", state.get("config", {}))):
                if not isinstance(part, Mapping):
                    raise TypeError(f"{name} {part!r:.40}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{start.folder} holds another state than this version writes ({one_line(error)}). {resume.FIX}"
            ) from error
        self.saved, self.saved_step = start.folder, start.step
