"""The jsonl logger: append-only files of one JSON object a line, flushed every step, cut back to a step when a run
resumes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from turnwise.contracts.logger import LoggerContext
from turnwise.data.record import plain, trajectory_record
from turnwise.data.trajectory import Trajectory
from turnwise_jsonl.config import JsonlConfig

# The step is the first key of every line, so a resume chooses lines without parsing them.
STEP = re.compile(rb'\{"step": (\d+)')


class JsonlLogger:
    """Writes `metrics.jsonl` and `trajectories/<split>.jsonl` below the run's folder."""

    def __init__(self, config: JsonlConfig, context: LoggerContext) -> None:
        self._config = config
        self._metrics = context.folder / "metrics.jsonl"
        self._trajectories = context.folder / "trajectories"
        self._files: dict[Path, IO[str]] = {}

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line: the step, then every metric; NaN and infinities as null."""
        self._write(self._metrics, [{"step": step} | {name: plain(value) for name, value in metrics.items()}])

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        """One line per trajectory, in the given order."""
        if self._config.trajectories and (split != "train" or step % self._config.every == 0):
            self._write(
                self._trajectories / f"{split}.jsonl",
                (trajectory_record(step, trajectory) for trajectory in trajectories),
            )

    def artifact(self, step: int, name: str, path: Path) -> None:
        """Files are not logged here: they already lie in the run's folder."""

    def resume(self, step: int) -> None:
        """Drop the lines of `step` and later, and a last line that was cut short; each file is replaced in one move."""
        self.close()
        for path in (self._metrics, *sorted(self._trajectories.glob("*.jsonl"))):
            if path.exists():
                _keep_before(path, step)

    def close(self) -> None:
        """Close the files; may be called twice, and a later write opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, path: Path, records: Iterable[Mapping[str, Any]]) -> None:
        if path not in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_partial_line(path)
            # A lone surrogate becomes its JSON escape.
            self._files[path] = path.open("a", encoding="utf-8", errors="backslashreplace")
        file = self._files[path]
        for record in records:
            # NaN is no JSON: one that `plain` did not turn into null is an error here, not an unreadable line.
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()


def _cut_partial_line(path: Path) -> None:
    """Remove a last line without its end (the process died while writing it): nothing may be appended to it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = kept = 0
        for line in file:
            size += len(line)
            kept = size if line.endswith(b"\n") else kept
        file.truncate(kept)


def _keep_before(path: Path, step: int) -> None:
    """Rewrite `path` without the lines of `step` and later and without a partial last line."""
    rewritten = path.with_name(path.name + ".tmp")
    with path.open("rb") as old, rewritten.open("wb") as new:
        for line in old:
            match = STEP.match(line)
            if line.endswith(b"\n") and not (match and int(match[1]) >= step):
                new.write(line)
        new.flush()
        # On the disk before it takes the old file's place: whenever the machine dies, one of the two is whole.
        os.fsync(new.fileno())
    os.replace(rewritten, path)
