"""Loggers that break their contract in one way each; test_testing_kit.py says which contract tests must notice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise import Implementation, hookimpl
from turnwise.contracts.logger import LoggerCapabilities, LoggerContext
from turnwise.data.trajectory import Trajectory
from turnwise.testing.fakes import (
    FakeLogger,
)


class RefusesNan(FakeLogger):
    def __init__(self, config: None, context: LoggerContext) -> None:
        self._folder = context.folder

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        json.dumps({name: float(value) for name, value in metrics.items()}, allow_nan=False)

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        pass

    def artifact(self, step: int, name: str, path: Path) -> None:
        pass

    def resume(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class WritesWhereItStands(RefusesNan):
    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        Path("metrics.txt").write_text(str(metrics), encoding="utf-8")


class WritesBesideTheRun(RefusesNan):
    """To a path that it makes itself, in nobody's current folder."""

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        (self._folder.parent / "all_runs.txt").write_text(str(metrics), encoding="utf-8")


class AppendsLines(RefusesNan):
    """What the next ones are made of: every number and every text as a line of JSON that begins with the step."""

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        self.add("metrics.jsonl", [step, {name: str(value) for name, value in metrics.items()}])

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        self.add("trajectories.jsonl", [step, [turn.text for t in trajectories for turn in t.turns]])

    def add(self, name: str, line: list[Any]) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def keep(self, name: str, before: int) -> None:
        path = self._folder / name
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in lines if json.loads(line)[0] < before), encoding="utf-8")


class NeverResumes(AppendsLines):
    pass


class ResumesAStepLate(AppendsLines):
    def resume(self, step: int) -> None:
        for name in ("metrics.jsonl", "trajectories.jsonl"):
            self.keep(name, step + 1)


class ResumesItsNumbersAlone(AppendsLines):
    def resume(self, step: int) -> None:
        self.keep("metrics.jsonl", step)


class ForgetsEverything(AppendsLines):
    def resume(self, step: int) -> None:
        for name in ("metrics.jsonl", "trajectories.jsonl"):
            self.keep(name, 0)


class OnlyAddsAndForgets(ForgetsEverything):
    capabilities = LoggerCapabilities(only_adds=True)


class NeverResumesInSecret(AppendsLines):
    """In a format in which no mark can be read."""

    def add(self, name: str, line: list[Any]) -> None:
        with (self._folder / name).open("ab") as file:
            file.write(bytes(255 - byte for byte in json.dumps(line).encode()))


class EmptiesTheFolder(RefusesNan):
    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def resume(self, step: int) -> None:
        for path in self._folder.glob("*.txt"):
            path.unlink()


@hookimpl
def loggers() -> list[Implementation]:
    made = [RefusesNan, WritesWhereItStands, EmptiesTheFolder, WritesBesideTheRun, NeverResumes, ResumesAStepLate]
    made += [ResumesItsNumbersAlone, ForgetsEverything, NeverResumesInSecret, OnlyAddsAndForgets]
    return [Implementation(c.__name__, c) for c in made]
