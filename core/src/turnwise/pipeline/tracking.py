"""All loggers of a run as one: a failing logger is reported once and switched off; it never stops the run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.contracts.logger import Logger
from turnwise.data.trajectory import Trajectory
from turnwise.errors import one_line

log = logging.getLogger("turnwise")


class Tracking:
    """The chosen loggers, in the YAML's order."""

    def __init__(self, loggers: Sequence[tuple[str, Logger]]) -> None:
        self._loggers = list(loggers)
        self._failures_reported = False

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step."""
        self._each("scalars", step, metrics)

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        """The trajectories of a step."""
        self._each("trajectories", step, split, trajectories)

    def artifact(self, step: int, name: str, path: Path) -> None:
        """A file that the run made."""
        self._each("artifact", step, name, path)

    def failures(self, where: str, lines: Sequence[str]) -> None:
        """Episodes that could not be played: all in run.log, the first of the run on the terminal too."""
        for line in lines:
            log.info("%s: %s", where, line)
        if lines and not self._failures_reported:
            self._failures_reported = True
            log.warning(
                "%s: %d attempts failed, the first: %s. Later ones are counted, and logged in run.log",
                where,
                len(lines),
                lines[0].rstrip("."),
            )

    def resume(self, step: int) -> None:
        """The run begins, or goes on, at `step`."""
        self._each("resume", step)

    def close(self) -> None:
        """Close every logger."""
        self._each("close")
        self._loggers = []

    def _each(self, method: str, *args: Any) -> None:
        # A copy: a logger that fails is removed while the others are called.
        for item in list(self._loggers):
            name, logger = item
            try:
                getattr(logger, method)(*args)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whatever a stranger's logger raises, sys.exit() too, must not stop the run
                log.warning("logger %s failed in %s and is switched off: %s", name, method, one_line(error))
                self._loggers.remove(item)
                # One that failed while it closed is not closed again.
                if method != "close":
                    # It was reported once; this is only to release its files.
                    with contextlib.suppress(Exception, SystemExit):
                        logger.close()
