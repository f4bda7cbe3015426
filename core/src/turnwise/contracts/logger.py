"""Loggers: scalars, trajectories and artifacts. A failing logger is reported once and switched off; it never stops a
run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from attrs import field, frozen

from turnwise.contracts.capabilities import Capabilities, Options
from turnwise.data.trajectory import Trajectory
from turnwise.errors import Problem


@frozen
class LoggerContext:
    """`folder`: the run's output folder. `exp_name`. `max_steps`: for progress. `config`: the resolved configuration as
    plain data, without keys and passwords."""

    folder: Path
    exp_name: str = "run"
    max_steps: int = 0
    config: Mapping[str, Any] = field(factory=dict)


@frozen
class LoggerCapabilities(Capabilities):
    """`pictures`: names of files that it draws into `context.folder`, for the report of the run to show.
    `only_adds`: it logs to a service whose history grows and nothing else, so `resume` drops nothing."""

    kind: ClassVar[str] = "logger"
    pictures: tuple[str, ...] = ()
    only_adds: bool = False


class Logger(Protocol):
    """Built as `Logger(config, context)`; what it draws it declares as LoggerCapabilities. One that needs what a machine
    may lack, such as a service's key, has ChecksBefore's method too."""

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of pipeline step `step`; values may be NaN, names may be new."""
        ...

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        """The trajectories of a step; `split` is `train` or `val`."""
        ...

    def artifact(self, step: int, name: str, path: Path) -> None:
        """A file that the run made (a frame, a GIF, a chart)."""
        ...

    def resume(self, step: int) -> None:
        """The run goes on at `step`: drop what was logged for it and later (`only_adds`: keep all of it)."""
        ...

    def close(self) -> None:
        """Flush and release; may be called twice."""
        ...


@runtime_checkable
class ChecksBefore(Protocol):
    """A logger's class that can tell before a run what it will lack."""

    @staticmethod
    def check(config: Options, context: LoggerContext) -> Iterable[Problem]:
        """What is wrong, without starting or writing anything; `path` is dotted from the options' own block on. `train`
        and `check` ask, `plan` and `eval` do not."""
        ...
