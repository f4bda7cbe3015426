"""`${…}` by OmegaConf: what a value names is resolved before it, once, so that neither time nor size can run away."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from attrs import define, field
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from turnwise.config.problems import Path, Report, at
from turnwise.config.source.layers import READS, Merged, first_line, in_plain
from turnwise.config.source.limits import DEEPEST, LONGEST_TEXT, MOST_VALUES, refusal
from turnwise.errors import did_you_mean

_WHOLE = re.compile(r"^\s*\$\{\s*([A-Za-z_][\w-]*(?:\.[\w-]+|\[\d+\])*)\s*\}\s*$")
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_KEY = re.compile(r"^\s*(?:oc\.(?:select|dict\.keys|dict\.values)\s*:\s*)?(\.*)([\w\-.\[\]]*)")
_VARIABLE = re.compile(r"^\s*oc\.env\s*:\s*([A-Za-z_]\w*)")
# Well below Python's limit of recursion.
_CHAIN = 100
"""How many `${…}` may name one another in a row; each is a call inside a call here and in OmegaConf."""
_ROUNDS = 1000
"""How many `${…}` of one text are looked into for what they name."""


class _TooMuchError(Exception):
    """What `${…}` makes is larger than a configuration may be."""


@define
class Resolved:
    """`data`: plain, every `${…}` replaced. `references`: path → the text with `${oc.env:…}` where a value came from
    the environment."""

    data: dict[str, Any]
    references: dict[Path, str] = field(factory=dict)


def resolve(merged: Merged, report: Report) -> Resolved:
    """Plain data with every `${…}` replaced. What cannot be resolved is reported and left null.

    Raises ConfigError at once where the result would be larger than a configuration may be."""
    if not OmegaConf.has_resolver("now"):
        # The newer name, from 2.4 on.
        register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
        register("now", _now, use_cache=True)
    # OmegaConf resolves at every access anew, so values that name each other would take exponential time; `plain` keeps
    # each result.
    raw = in_plain(merged.config)
    # Where a copied block was written, known before anything inside it is reported.
    for path, text in _texts(raw, ()):
        if match := _WHOLE.match(text):
            report.sources.copies[path] = _split(match[1])
    return _Resolution(merged.config, raw, report).run()


def _now(pattern: str = "%Y-%m-%d_%H-%M-%S") -> str:
    return datetime.now().strftime(pattern)


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Every text that has something to resolve, with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _texts(inner, (*path, i))
    elif isinstance(value, str) and ("${" in value or value == "???"):
        yield path, value


def _split(key: str) -> Path:
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"[.\[\]]+", key) if part)


@define(eq=False)
class _Resolution:
    """The work of `resolve`. `plain` starts as the raw data and becomes the result, value by value."""

    config: DictConfig
    plain: dict[Any, Any]
    report: Report
    references: dict[Path, str] = field(factory=dict)
    waiting: dict[Path, str] = field(factory=dict)
    failed: set[Path] = field(factory=set)
    busy: list[Path] = field(factory=list)
    values: int = 0
    characters: int = 0

    def run(self) -> Resolved:
        self.waiting = dict(_texts(self.plain, ()))
        for path in list(self.waiting):
            try:
                self._settle(path)
            except _TooMuchError as error:
                self.report.unusable(path, str(error))
                self.report.raise_problems()
        for path in self.failed:
            self._holder(self.plain, path)[path[-1]] = None
        return Resolved({str(key): value for key, value in self.plain.items()}, self.references)

    def _settle(self, path: Path) -> None:
        """Resolve the text at `path` after everything that it names, and write the value in its place: nothing is
        resolved twice."""
        if path not in self.waiting or path in self.busy:
            return  # a circle: OmegaConf says so when it comes to it
        raw = self.waiting[path]
        if len(self.busy) >= _CHAIN:
            raise _TooMuchError(
                f"{raw!r:.80}: more than {_CHAIN} interpolations name one another in a row. Fix: name the value itself"
            )
        self.busy.append(path)
        named, copied = self._named(raw, path)
        self.busy.pop()
        del self.waiting[path]
        # A plain copy needs no OmegaConf, which would take a millisecond for each value.
        if copied is not None and not self._blamed([copied]) and not self._circular(copied, path):
            self._write(path, copy.deepcopy(at(self.plain, copied)))
            return
        try:
            value = self._holder(self.config, path)[path[-1]]
            value = OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value
            if why := refusal(value):
                self.failed.add(path)
                self.report.unusable(path, f"{raw!r:.80}: {why}")
            else:
                self._write(path, value)
        except (OmegaConfBaseException, RecursionError) as error:
            self._refuse(path, raw, named, error)

    def _write(self, path: Path, value: Any) -> None:
        if isinstance(value, dict | list) and len(path) + _depth(value) > DEEPEST:
            raise _TooMuchError(f"more than {DEEPEST} blocks inside each other, copied by `${{…}}`. Fix: copy fewer")
        # A block is copied from `plain`, and OmegaConf takes a millisecond for each of its values.
        if not isinstance(value, dict | list):
            self._holder(self.config, path)[path[-1]] = escaped(value)
        self._holder(self.plain, path)[path[-1]] = value

    def _bound(self, copied: Any, raw: str) -> None:
        """Count what is copied, before OmegaConf does it."""
        values, characters = _size(copied)
        self.values += values
        self.characters += characters
        if self.values > MOST_VALUES or self.characters > LONGEST_TEXT:
            what = (
                f"{self.values} values and {self.characters} characters, {MOST_VALUES} and {LONGEST_TEXT} are the most"
            )
            raise _TooMuchError(f"{raw!r:.80}: what `${{…}}` copies is too large: {what}. Fix: copy less")

    def _named(self, raw: str, path: Path) -> tuple[list[Path], Path | None]:
        """Settle what a text names, innermost first: all of it, and what the whole text is a copy of.

        Where it comes from the environment, its reference is noted."""
        named, text, kept, secret = list[Path](), raw, list[str](), False
        copied: Path | None = None
        while match := _INNERMOST.search(text):
            if len(named) + len(kept) > _ROUNDS:
                raise _TooMuchError(f"{raw!r:.80}: more than {_ROUNDS} interpolations in one text. Fix: write it out")
            body = match[1]
            shown = _expand("${" + body + "}", kept)
            target = self._target(body, path)
            found = at(self.plain, target, _NOTHING) if target else _NOTHING
            if target is not None and found is not _NOTHING:
                named.append(target)
                # A block is copied as it stands, so what it holds has to be resolved before.
                for inner, _ in list(_texts(found, target)):
                    self._settle(inner)
                found = at(self.plain, target)
                self._bound(found, raw)
                whole = match[0] == text.strip()
                copied = target if whole and ":" not in body and "\0" not in body else None
                secret = self._copy_references(target, path, whole) or secret
                shown = self.references.get(target, str(found) if not isinstance(found, dict | list) else shown)
                # A value with marks of its own must not be taken for an interpolation once it stands in the text.
                simple = not isinstance(found, dict | list) and not re.search(r"[${}\0]", str(found))
                if simple and target not in self.references:
                    # Part of a longer key, maybe.
                    text = text[: match.start()] + str(found) + text[match.end() :]
                    continue
            elif _VARIABLE.match(body):
                secret = True
            kept.append(shown)
            # A mark in its place, of a character that no YAML text can hold: the next search must not find it again.
            text = f"{text[: match.start()]}\0{len(kept) - 1}\0{text[match.end() :]}"
        if secret:
            self.references[path] = _expand(text, kept)
        return named, copied

    def _target(self, body: str, path: Path) -> Path | None:
        """The path that the inside of a `${…}` names; None for a resolver's call."""
        match = _KEY.match(body)
        if match is None or (":" in body and not match[0].lstrip().startswith("oc.")):
            return None
        dots, key = match.groups()
        base = path[: max(0, len(path) - len(dots))] if dots else ()
        target = base + _split(key)
        return target or None

    def _copy_references(self, target: Path, path: Path, whole: bool) -> bool:
        """Note what a copied block holds of the environment; whether the target itself does."""
        if whole:
            inside = {
                p: text for p, text in self.references.items() if len(p) > len(target) and p[: len(target)] == target
            }
            self.references.update({path + p[len(target) :]: text for p, text in inside.items()})
        return target in self.references

    def _refuse(self, path: Path, raw: str, named: list[Path], error: BaseException) -> None:
        """Report what cannot be resolved, unless what it names is at fault and has been reported."""
        blamed = self._blamed(named)
        self.failed.add(path)
        if raw == "???":
            self.report.unusable(
                path,
                f"'???' stands for a value that must be given. Fix: write it, or pass {'.'.join(map(str, path))}=…",
            )
        elif blamed:
            self.report.reported_elsewhere(path)
        else:
            missing = next((name for name in READS.findall(raw) if name not in self.plain), "")
            hint = did_you_mean(missing, map(str, self.plain)) if missing else ""
            why = "too many inside each other" if isinstance(error, RecursionError) else first_line(error)
            self.report.unusable(
                path, f"{raw!r} cannot be resolved: {why}.{hint} Fix: define the key, or write the value"
            )

    def _circular(self, copied: Path, path: Path) -> bool:
        return path[: len(copied)] == copied or any(
            p in self.waiting for p, _ in _texts(at(self.plain, copied), copied)
        )

    def _blamed(self, named: list[Path]) -> bool:
        return any(p[: len(target)] == target for target in named for p in self.failed)

    def _holder(self, data: Any, path: Path) -> Any:
        for part in path[:-1]:
            data = data[part]
        return data


_NOTHING: Any = object()


def _expand(text: str, kept: list[str]) -> str:
    """The text with the pieces that were taken out of it put back."""
    return re.sub(r"\0(\d+)\0", lambda match: kept[int(match[1])], text)


def _size(value: Any) -> tuple[int, int]:
    """How many values, and characters of text."""
    if isinstance(value, dict | list):
        inner = [_size(v) for v in (value.values() if isinstance(value, dict) else value)]
        return 1 + sum(v for v, _ in inner), sum(c for _, c in inner)
    return 0, len(value) if isinstance(value, str) else 8


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def escaped(value: Any) -> Any:  # Any: YAML's data
    """A copy in which text that looks like `${…}` stays text."""
    if isinstance(value, dict):
        return {k: escaped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [escaped(v) for v in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def secrets(references: Mapping[Path, str]) -> dict[str, str]:
    """The values of the environment that the references name, long enough to be distinguished from a word → how to name
    them."""
    names = {name for text in references.values() for name in re.findall(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)", text)}
    return {os.environ[name]: f"${{oc.env:{name}}}" for name in sorted(names) if len(os.environ.get(name, "")) >= 8}
