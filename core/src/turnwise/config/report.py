"""Everything that loading a configuration has to say: where each key was written, the problems, the warnings, the notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define, field

from turnwise.errors import ConfigError

Path = tuple[Any, ...]
"""The way to a value: keys of mappings and indices of lists, from the root."""


def dotted(path: Path) -> str:
    """`$.a.b[0]` for a path."""
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


@define
class Sources:
    """Where every value was written: `file:line`, or the override that brought it.

    `moved` maps the path that a value has now to the one at which the user wrote it (translated keys); `copies` maps a path whose
    value is one whole `${…}` to the block that it copies."""

    root: str
    places: dict[Path, str] = field(factory=dict)
    moved: dict[Path, Path] = field(factory=dict)
    copies: dict[Path, Path] = field(factory=dict)

    def written(self, path: Path) -> Path:
        """The path at which the user wrote what now stands at `path`."""
        for cut in range(len(path), 0, -1):
            if path[:cut] in self.moved:
                return self.moved[path[:cut]] + path[cut:]
        return path

    def where(self, path: Path) -> str:
        """The place of a path, or of the nearest block around it."""
        return self._place(self.written(path), 20)

    def _place(self, path: Path, depth: int) -> str:
        for cut in range(len(path), 0, -1):
            if path[:cut] in self.places:
                if cut < len(path) and path[:cut] in self.copies and depth:
                    return self._place(self.copies[path[:cut]] + path[cut:], depth - 1)
                return self.places[path[:cut]]
        return self.root


@define
class Report:
    """Collects while the configuration is read, so that all mistakes are told at once."""

    sources: Sources
    notes: list[str] = field(factory=list)
    warnings: list[str] = field(factory=list)
    lacks: list[str] = field(factory=list)
    """What is not here, in a configuration that is not wrong: an environment that is not installed, a feature that this version lacks."""
    planning: bool = False
    """Only arithmetic is wanted: what is not here is a warning."""
    cause: BaseException | None = None
    """The exception behind the first problem with a plugin, to be chained."""
    _problems: dict[str, tuple[str, int]] = field(factory=dict)
    _told: set[Path] = field(factory=set)

    def error(self, path: Path, text: str) -> None:
        """A mistake; the run cannot start."""
        if any(self.sources.written(path)[:cut] in self._told for cut in range(1, len(path) + 1)):
            return
        where = self.sources.where(path)
        line = where.rpartition(":")[2]
        self._problems.setdefault(self._line(path, text), (where.rpartition(":")[0], int(line) if line.isdigit() else 0))

    def warn(self, path: Path, text: str) -> None:
        """Something that has no effect, or hardly the one that was meant."""
        line = self._line(path, text)
        if line not in self.warnings:
            self.warnings.append(line)

    def lack(self, path: Path, text: str, planned: str) -> None:
        """Something that is not here; a warning with the words `planned` behind it where only arithmetic is wanted."""
        if self.planning:
            self.warn(path, f"{text} {planned}")
        elif (line := self._line(path, text)) not in self.lacks:
            self.lacks.append(line)

    def note(self, path: Path, text: str) -> None:
        """A key of the field that was translated."""
        line = self._line(path, text)
        if line not in self.notes:
            self.notes.append(line)

    def plain(self, line: str) -> None:
        """A mistake whose line is already written, place included."""
        where, _, number = line.split(": ", 1)[0].rpartition(":")
        self._problems.setdefault(line, (where, int(number) if number.isdigit() else 0))

    def unusable(self, path: Path, text: str) -> None:
        """A mistake that leaves no value behind: what else is wrong there is not told."""
        self.error(path, text)
        self.told(path)

    def told(self, path: Path) -> None:
        """What is wrong at `path` is reported elsewhere."""
        self._told.add(path)

    @property
    def problems(self) -> list[str]:
        """The problems in the order of the files' lines."""
        return [text for text, _ in sorted(self._problems.items(), key=lambda item: item[1])]

    def raise_problems(self) -> None:
        """Raise ConfigError with every problem, if there is one."""
        if self._problems:
            raise ConfigError(self.problems) from self.cause

    def _line(self, path: Path, text: str) -> str:
        text = " ".join(part.strip() for part in text.splitlines())  # what a plugin or a parser says may have several
        return f"{self.sources.where(path)}: {dotted(self.sources.written(path))}: {text}"


def at(data: Any, path: Path, default: Any = None) -> Any:
    """The value at `path` in plain data, or `default`."""
    for part in path:
        listed = isinstance(data, list) and isinstance(part, int) and -len(data) <= part < len(data)
        if listed or (isinstance(data, Mapping) and part in data):
            data = data[part]
        else:
            return default
    return data
