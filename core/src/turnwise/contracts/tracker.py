"""What loggers of a tracking service share: a run of the service for each training run, continued under its id when
that is resumed."""

from __future__ import annotations

import glob
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from attrs import field, frozen, validators

from turnwise.contracts.logger import LoggerCapabilities, LoggerContext
from turnwise.data.trajectory import Trajectory
from turnwise.data.transcript import readable
from turnwise.errors import Problem

ServiceRun = Any
"""A run as the service's own package has it."""
Shown = Any
"""What that package logs: a number, a table, a picture."""
PICTURES, FILM = (".png", ".jpg", ".jpeg"), ".gif"


@frozen
class TrackerConfig:
    """Options of every service. `project`, `name` (none: `exp_name`), `tags`, `group`, `job_type`: of the service's run.

    `trajectories`: of the first so many of a step (0: none). `every`: those of training steps 0, every, 2·every, …;
    those of evaluations always. `system_metrics`: the machine and its load. `init_timeout`, `finish_timeout`: seconds
    that the service has to begin the run, and to take what is left at its end. `api_key`: refused.
    """

    capabilities = LoggerCapabilities(only_adds=True)

    project: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    group: str | None = None
    job_type: str | None = None
    trajectories: int = field(default=8, validator=validators.ge(0))
    every: int = field(default=10, validator=validators.ge(1))
    system_metrics: bool = True
    init_timeout: float = field(default=90.0, validator=validators.gt(0))
    finish_timeout: float = field(default=600.0, validator=validators.gt(0))
    api_key: str | None = field(default=None, repr=False)


class Tracker(ABC):
    """A base class for loggers of a service: what the service itself does is left to write.

    Local files lie in the folder `service` below that of the training run, with the id of the service's run in
    `turnwise_run_id`.
    """

    service: ClassVar[str]
    _config: TrackerConfig

    def __init__(self, config: TrackerConfig, context: LoggerContext) -> None:
        self._config = config
        self._context = context
        self._folder = context.folder / self.service
        self._kept_id = self._folder / "turnwise_run_id"
        self._id: str | None = None
        self._run: ServiceRun = None

    @abstractmethod
    def begin(self, run_id: str) -> ServiceRun:
        """The service's run of this id, begun, or continued where the service has it."""
        ...

    @abstractmethod
    def leaves_files(self, run: ServiceRun) -> bool:
        """Whether the run is kept anywhere: not where the service is switched off."""
        ...

    @abstractmethod
    def end(self, run: ServiceRun, error: type[BaseException] | None) -> None:
        """End the run, as a failed one where an `error` ends it."""
        ...

    @abstractmethod
    def log(self, run: ServiceRun, step: int, values: Mapping[str, Shown]) -> None:
        """Numbers (NaN and infinities too), and what `shown`, `picture` and `film` made, at a step."""
        ...

    @abstractmethod
    def shown(self, trajectories: Sequence[Trajectory]) -> Shown:
        """The transcripts as the service shows texts."""
        ...

    @abstractmethod
    def picture(self, path: Path) -> Shown:
        """A PNG or JPEG file."""
        ...

    @abstractmethod
    def film(self, path: Path) -> Shown:
        """A GIF file."""
        ...

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Every metric at its step."""
        if metrics:
            self.log(self._open(), step, {name: float(value) for name, value in metrics.items()})

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        """The first of them, of the steps that the options say."""
        first = trajectories[: self._config.trajectories]
        if first and (split != "train" or step % self._config.every == 0):
            self.log(self._open(), step, {f"trajectories/{split}": self.shown(first)})

    def artifact(self, step: int, name: str, path: Path) -> None:
        """A picture or a film among the metrics; any other file among the run's files."""
        suffix = path.suffix.lower()
        if suffix in PICTURES:
            self.log(self._open(), step, {name: self.picture(path)})
        elif suffix == FILM:
            self.log(self._open(), step, {name: self.film(path)})
        else:
            self._open().save(glob.escape(str(path)), base_path=str(path.parent), policy="now")

    def resume(self, step: int) -> None:
        """Begin a run, or go on with the one of this folder, which keeps what it has of `step` and later."""
        self.close()
        self._id = self._kept_id.read_text(encoding="utf-8") if step > 0 and self._kept_id.exists() else None
        self._open()

    def close(self) -> None:
        """End the run; may be called twice."""
        if self._run is not None:
            run, self._run = self._run, None
            self.end(run, sys.exc_info()[0])

    def _open(self) -> ServiceRun:
        """The run; begun now if it is not, and continued if it was closed."""
        if self._run is None:
            self._id = self._id or secrets.token_hex(8)
            self._run = self.begin(self._id)
            if self.leaves_files(self._run):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._kept_id.write_text(self._id, encoding="utf-8")
        return self._run


def transcript(trajectory: Trajectory) -> str:
    """An episode for people, in a text that every service takes: a lone surrogate becomes its escape."""
    return plain(readable(trajectory))


def plain(text: str) -> str:
    """A text that UTF-8 can encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@runtime_checkable
class _Listed(Protocol):
    """Pydantic's error, which this core does not know."""

    def errors(self) -> Sequence[Mapping[str, Any]]: ...


def reasons(error: ValueError) -> list[str]:
    """Which settings a service's package refuses (by pydantic, or in its own words), without their values."""
    if not isinstance(error, _Listed):
        return [str(error)]
    return [": ".join(filter(None, [".".join(map(str, one["loc"])), str(one["msg"])])) for one in error.errors()]


def keys_in_the_file(values: Mapping[str, object], command: str, variable: str) -> Iterator[Problem]:
    """Each option (path → value) that holds a key is refused: it would be copied with the file."""
    fix = f"Fix: remove it, and run `{command}` or set the environment variable {variable}"
    yield from (Problem(path, f"a key stands in no file. {fix}") for path, value in values.items() if value)


def no_key(service: str, host: str, command: str, variable: str) -> Problem:
    """Online without a key, which the run could not begin without."""
    fix = f"Fix: {command}, or the environment variable {variable}, or mode: offline"
    return Problem("mode", f"online, and there is no {service} key for {host} on this machine. {fix}", machine=True)
