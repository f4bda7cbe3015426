"""Rules for single keys: each finds its key in plain data and moves, replaces, ignores or refuses it, with a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from attrs import define, frozen

from turnwise.config.problems import Data, Path, Report, at, dotted
from turnwise.config.schema import MANAGERS, ROLES
from turnwise.plugins import Registry

NOTHING: Any = object()


@define(eq=False)
class Edit:
    """One key under translation: where it stands, its value, the rule's reason, and the data to change."""

    data: dict[str, Any]
    registry: Registry
    report: Report
    loose: set[Path]
    path: Path = ()
    value: Any = None
    why: str = ""

    def drop(self) -> None:
        """Take the key out."""
        at(self.data, self.path[:-1]).pop(self.path[-1], None)

    def get(self, *path: Any) -> Any:  # Any: what a file held
        """The value at a path, or NOTHING."""
        return at(self.data, path, NOTHING)

    def put(self, path: Path, value: Any) -> bool:  # Any: what a file held
        """Write a value that comes from this key; False (and an error) when another value stands there."""
        block: Any = self.data
        for part in path[:-1]:
            if block.get(part) is None:
                block[part] = {}
            # The rest of the path does not exist yet, or is null: a block written without keys.
            block = block[part]
            if not isinstance(block, dict):
                return False  # of the wrong type: the conversion reports it
        if path[-1] in block and block[path[-1]] != value:
            self.report.error(
                self.path,
                f"{self.value!r} here, and {block[path[-1]]!r} at {dotted(path)}: the same setting twice. Fix:"
                " keep one",
            )
            return False
        if path[-1] not in block:
            # A message about the new key names the line of the old one.
            self.report.sources.moved[path] = self.report.sources.written(self.path)
        block[path[-1]] = value
        return True

    def note(self, text: str) -> None:
        """Report what the key became, with the reason."""
        self.report.note(self.path, f"{text} ({self.why})" if self.why else text)

    def refuse(self, text: str, fix: str) -> None:
        """The key's value cannot be used."""
        self.report.error(self.path, f"{text}. Fix: {fix}")


Action = Callable[[Edit], None]


@frozen
class Rule:
    """`key`: a dotted path; ROLE, MANAGER and TAG stand for any of theirs, `*` inside a part matches. `why`: for the
    message.

    `free`: a name that people also give to values of their own, which `${…}` reads; then it is left alone."""

    key: str
    action: Action
    why: str
    free: bool = False


def move(to: str) -> Action:
    """The key under its name here; `to` may hold the first part of the found path as `{0}`, the second as `{1}`."""

    def action(edit: Edit) -> None:
        target = tuple(to.format(*edit.path).split("."))
        edit.drop()
        edit.put(target, edit.value)
        edit.note(f"is {dotted(target)} here")

    return action


def alias(names: Mapping[str, str]) -> Action:
    """Another spelling of the value."""

    def action(edit: Edit) -> None:
        if isinstance(edit.value, str) and edit.value in names:
            at(edit.data, edit.path[:-1])[edit.path[-1]] = names[edit.value]
            edit.note(f"{edit.value!r} is {names[edit.value]!r} here")

    return action


def ignore(*harmless: Any, fix: str = "") -> Action:  # Any: values of a YAML
    """The key does not apply: a warning. With `harmless`, any other value is refused."""

    def action(edit: Edit) -> None:
        edit.drop()
        if harmless and edit.value not in harmless:
            edit.refuse(f"{edit.value!r} is not supported: {edit.why}", fix or "remove the key")
        else:
            edit.report.warn(edit.path, f"does not apply: {edit.why}")

    return action


def later(*off: Any, keep: bool = True) -> Action:  # Any: values of a YAML
    """A feature that this version lacks: refused unless it is switched off. `keep` False: the schema has no such
    key."""

    def action(edit: Edit) -> None:
        # 0 == False in Python, so the kind has to agree too.
        if not any(edit.value == value and isinstance(edit.value, bool) == isinstance(value, bool) for value in off):
            shown = f", or set {edit.path[-1]}: {json.dumps(off[0])}" if off else ""
            what, fix = (
                f"{edit.path[-1]} = {edit.value!r}: {edit.why} is not supported by this version",
                f"remove the key{shown}",
            )
            edit.refuse(what, fix)
            edit.drop()
        elif not keep:
            edit.drop()

    return action


def matches(data: Any, parts: tuple[str, ...], path: Path = ()) -> Iterator[Path]:  # Any: a YAML's data
    """The paths of `data` that a rule's key names."""
    if not parts:
        yield path
        return
    if not isinstance(data, Mapping):
        return
    for key in list(data):
        if _same(str(key), parts[0], path):
            yield from matches(data[key], parts[1:], (*path, key))


def _same(key: str, part: str, path: Path) -> bool:
    if part == "ROLE":
        return key in ROLES
    if part == "MANAGER":
        return key in MANAGERS
    if part == "TAG":
        return path == ("custom_envs",)
    return fnmatchcase(key, part)


def apply(rules: tuple[Rule, ...], data: Data, reads: set[str], registry: Registry, report: Report) -> set[Path]:
    """Apply every rule, in order. Returns the options that a chosen implementation may lack (they came from
    elsewhere)."""
    loose: set[Path] = set()
    for rule in rules:
        # `${…}` reads a value of the user's own under this name.
        if rule.free and rule.key in reads:
            continue
        # A list: actions take keys out of what is walked through.
        for path in list(matches(data, tuple(rule.key.split(".")))):
            value = at(data, path, NOTHING)
            if value is not NOTHING:
                # A rule that had nothing to say changed nothing, and makes no file a foreign one.
                said = report.said
                rule.action(Edit(data, registry, report, loose, path, value, rule.why))
                report.foreign = report.foreign or report.said != said
    return loose


_RANGE = re.compile(r"^list\(\s*range\(\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*)?(?:,\s*(-?\d+)\s*)?,?\s*\)\s*\)$")
_LIST = re.compile(r"^\[\s*(\d+(?:\s*,\s*\d+)*)?\s*,?\s*\]$")


def parse_devices(text: str) -> list[int] | None:
    """`list(range(0,4))`, `[0, 1]` and sums of them, read as text and never evaluated; None for anything else."""
    found: list[int] = []
    for term in text.split("+"):
        term = term.strip()
        if match := _RANGE.match(term):
            numbers = [int(n) for n in match.groups() if n is not None]
            if len(numbers) == 3 and numbers[2] == 0:
                return None
            # A range is written out below: a slip of a few digits must not take the memory.
            if abs(numbers[-1] if len(numbers) < 3 else numbers[1]) > 1_000_000:
                return None
            found += range(*numbers)
        elif match := _LIST.match(term):
            found += [int(n) for n in (match[1] or "").split(",") if n.strip()]
        else:
            return None
    return found
