"""Everything that loading a configuration has to say: where each key was written, the problems, the warnings, the
notes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import define, field

from turnwise.errors import ConfigError

Data = dict[str, Any]
"""A mapping of a configuration as YAML has it: nothing of it is checked yet."""
Path = tuple[Any, ...]
"""The way to a value: keys of mappings and indices of lists, from the root."""


LONGEST_LINE = 1000
_KEYED = re.compile(r"\$\.([\w.\[\]-]+): ")
_WORD = re.compile(r"\S{300,}")
"""What is longer than any path that somebody wrote on purpose: its ends say enough."""


def dotted(path: Path) -> str:
    """`$.a.b[0]` for a path."""
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


@define
class Sources:
    """Where every value was written: `file:line`, or the override that brought it.

    `moved` maps the path that a value has now to the one at which the user wrote it (translated keys); `copies` maps a
    path whose value is one whole `${…}` to the block that it copies."""

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

    def forget(self, path: Path) -> None:
        """What stood under `path` was replaced: where that was written says nothing any more."""
        for place in [p for p in self.places if p[: len(path)] == path]:
            del self.places[place]

    def wrote(self, path: Path) -> bool:
        """Whether somebody wrote this very key, and it is no default."""
        return self.written(path) in self.places

    def where(self, path: Path) -> str:
        """The place of a path, or of the nearest block around it."""
        return self._place(self.written(path), 20)

    def placed(self, line: str) -> str:
        """A line that begins with a key (`$.actor_infer.device_mapping: …`), with the place where that was written
        before it."""
        match = _KEYED.match(line)
        if match is None:
            return line
        path = tuple(int(part) if part.isdecimal() else part for part in re.split(r"[.\[\]]+", match[1]) if part)
        return f"{self.where(path)}: {line}"

    def _place(self, path: Path, depth: int) -> str:
        for cut in range(len(path), 0, -1):
            if path[:cut] in self.places:
                if cut < len(path) and path[:cut] in self.copies and depth:
                    # A value inside a copied block was written where the original stands.
                    return self._place(self.copies[path[:cut]] + path[cut:], depth - 1)
                return self.places[path[:cut]]
        return self.root


@define
class Report:
    """Collects while the configuration is read, so that all mistakes are reported at once."""

    sources: Sources
    notes: list[str] = field(factory=list)
    warnings: list[str] = field(factory=list)
    lacks: list[str] = field(factory=list)
    """What this machine lacks for a configuration that is not wrong."""
    missing: list[str] = field(factory=list)
    """What Turnwise lacks for it: an environment that no plugin here brings, a feature of a later version."""
    foreign: bool = False
    """Whether a key of the field was translated, does not apply or was refused: the file comes from another framework."""
    planning: bool = False
    """Only arithmetic is wanted: what is not here is a warning."""
    cause: BaseException | None = None
    """The exception behind the first problem with a plugin, to be chained."""
    secrets: dict[str, str] = field(factory=dict)
    """Values of the environment → the reference that stands for them in every line."""
    _problems: dict[str, tuple[str, int]] = field(factory=dict)
    _reported: set[Path] = field(factory=set)

    def error(self, path: Path, text: str) -> None:
        """A mistake; the run cannot start."""
        # What was reported of a block is not reported again of all that is in it.
        if any(self.sources.written(path)[:cut] in self._reported for cut in range(1, len(path) + 1)):
            return
        where = self.sources.where(path)
        line = where.rpartition(":")[2]
        self._problems.setdefault(
            self._line(path, text), (where.rpartition(":")[0], int(line) if line.isdecimal() else 0)
        )

    def warn(self, path: Path, text: str) -> None:
        """Something that has no effect, or hardly the one that was meant."""
        line = self._line(path, text)
        # A value that several roles take is spoken of once.
        if line not in self.warnings:
            self.warnings.append(line)

    def lack(self, path: Path, text: str, planned: str) -> None:
        """Something that this machine has not; a warning with the words `planned` behind it where only arithmetic is
        wanted."""
        self._absent(self.lacks, path, text, planned)

    def miss(self, path: Path, text: str, planned: str) -> None:
        """Something that Turnwise has not, on any machine; likewise."""
        self._absent(self.missing, path, text, planned)

    def _absent(self, lines: list[str], path: Path, text: str, planned: str) -> None:
        if self.planning:
            self.warn(path, f"{text} {planned}")
        elif (line := self._line(path, text)) not in lines:
            lines.append(line)

    def note(self, path: Path, text: str) -> None:
        """A key of the field that was translated."""
        line = self._line(path, text)
        if line not in self.notes:
            self.notes.append(line)

    def plain(self, line: str) -> None:
        """A mistake whose line is already written, place included."""
        where, _, number = line.split(": ", 1)[0].rpartition(":")
        self._problems.setdefault(line, (where, int(number) if number.isdecimal() else 0))

    def unusable(self, path: Path, text: str) -> None:
        """A mistake that leaves no value behind: what else is wrong there is not reported."""
        self.error(path, text)
        self.reported_elsewhere(path)

    def reported_elsewhere(self, path: Path) -> None:
        """What is wrong at `path` is reported elsewhere."""
        self._reported.add(path)

    @property
    def said(self) -> int:
        """How many lines there are, of every kind."""
        return len(self.notes) + len(self.warnings) + len(self.missing) + len(self._problems)

    @property
    def problems(self) -> list[str]:
        """The problems in the order of the files' lines."""
        return [text for text, _ in sorted(self._problems.items(), key=lambda item: item[1])]

    def raise_problems(self) -> None:
        """Raise ConfigError with every problem, if there is one, and what else there is to say."""
        if self._problems:
            besides = [*(f"warning: {line}" for line in self.warnings), *(f"machine: {line}" for line in self.lacks)]
            raise ConfigError([*self.problems, *self.missing], besides) from self.cause

    def _line(self, path: Path, text: str) -> str:
        # What a plugin or a parser says may have several.
        text = " ".join(part.strip() for part in text.splitlines())
        text = _WORD.sub(lambda word: f"{word[0][:100]}…{word[0][-20:]}", text)
        line = masked(f"{self.sources.where(path)}: {dotted(self.sources.written(path))}: {text}", self.secrets)
        # Cut in the middle: the fix stands at the end.
        return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE // 2]} … {line[-LONGEST_LINE // 2 :]}"


def masked(text: str, secrets: Mapping[str, str]) -> str:
    """The text with the references of the environment's values in their places."""
    # The longest first: one secret may be a part of another.
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, secrets[value])
    return text


def at(data: Any, path: Path, default: Any = None) -> Any:  # Any: YAML's data
    """The value at `path` in plain data, or `default`."""
    for part in path:
        listed = isinstance(data, list) and isinstance(part, int) and -len(data) <= part < len(data)
        if listed or (isinstance(data, Mapping) and part in data):
            data = data[part]
        else:
            return default
    return data
