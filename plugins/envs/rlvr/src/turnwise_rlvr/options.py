"""The options of `rlvr` as frozen records: data sources with their columns, and the rewards; or ConfigError with the
fix."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise.errors import ConfigError, did_you_mean, listed

COLUMNS = {"question": "question", "answer": "answer", "tag": "tag", "choices": "choices"}
"""What a row may hold, and the column where it stands unless `columns` says another."""
_SOURCE = ("path", "generate", "weight", "tag", "tags", "columns")


@frozen
class Source:
    """One entry of `data`: files, or a generator with its options.

    `files`: paths, absolute. `stamps`: (mtime, size) of each, so that a file that was written anew is read anew.
    `generate`, `options`: a generator's name and its options, sorted. `weight`: the share of its rows (None: as many as
    it has). `tag`: of rows that have none of their own. `tags`: the tags of the rows that are taken (empty: all).
    `columns`: what → name of the column, sorted.
    """

    files: tuple[str, ...]
    stamps: tuple[tuple[int, int], ...]
    generate: str
    options: tuple[tuple[str, Any], ...]
    weight: float | None
    tag: str
    tags: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """For messages."""
        return self.generate or ", ".join(self.files)


@frozen
class RewardChoice:
    """One entry of `rewards`: `use` with its own `options`, the factor `weight`, and the tags of the rows that it is for
    (empty: all). `options` are JSON, so that what was read once is known by them."""

    use: str
    weight: float = 1.0
    tags: tuple[str, ...] = ()
    options: str = "{}"


def sources(data: Any, columns: Mapping[str, str] | None) -> tuple[Source, ...]:
    """`data` of env_config: a path, an entry, or a list of them."""
    entries = data if isinstance(data, Sequence) and not isinstance(data, str) else [data]
    if not entries:
        raise ConfigError("data is empty, rlvr. Fix: data: FILE.jsonl")
    found = tuple(
        _source(entry, f"data[{i}]" if entries is data else "data", columns or {}) for i, entry in enumerate(entries)
    )
    if len({source.weight is None for source in found}) > 1:
        raise ConfigError(
            "data: some entries have a weight and some have none, rlvr. Fix: a weight for all, or for none."
        )
    return found


def rewards(value: Any) -> tuple[RewardChoice, ...]:
    """`rewards` of env_config: a name, an entry, or a list of them."""
    entries = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not entries:
        raise ConfigError("rewards is empty, rlvr. Fix: rewards: math")
    return tuple(_reward(entry, f"rewards[{i}]" if entries is value else "rewards") for i, entry in enumerate(entries))


def integer(name: str, value: Any, least: int, most: int) -> int:
    """An integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}, rlvr. Fix: an integer from {least} to {most}.")
    return value


def positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name} is {value!r}, rlvr. Fix: a number above 0.")
    return float(value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """A text, or a list of texts, none of them empty."""
    entries = [value] if isinstance(value, str) else value
    whole = isinstance(entries, Sequence) and bool(entries) and all(isinstance(one, str) and one for one in entries)
    if not whole:
        raise ConfigError(f"{name} is {value!r}, rlvr. Fix: a text, or a list of them.")
    return tuple(entries)


def known_keys(name: str, entry: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError for a key that is none of `known`."""
    for key in entry:
        if key not in known:
            raise ConfigError(
                f"{name}: unknown key {key!r}, rlvr.{did_you_mean(str(key), known)} Known: {listed(known)}. Fix: correct or"
                " remove it."
            )


def _source(entry: Any, name: str, columns: Mapping[str, str]) -> Source:
    if isinstance(entry, str):
        entry = {"path": entry}
    if not isinstance(entry, Mapping) or ("path" in entry) == ("generate" in entry):
        raise ConfigError(
            f"{name} is {entry!r:.120}, rlvr. Fix: a path, or a mapping with either `path` or `generate`."
        )
    if "generate" not in entry:
        known_keys(name, entry, [key for key in _SOURCE if key != "generate"])
    files = tuple(_file(name, path) for path in texts(f"{name}.path", entry["path"])) if "path" in entry else ()
    own = entry.get("columns") or {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"{name}.columns is {own!r}, rlvr. Fix: a mapping, as {{question: problem}}.")
    named = {**COLUMNS, **columns, **own}
    for key, column in named.items():
        if key not in COLUMNS or not isinstance(column, str):
            raise ConfigError(
                f"columns: {key!r}: {column!r}, rlvr.{did_you_mean(str(key), COLUMNS)} Fix: the name of a column for one of"
                f" {listed(COLUMNS)}, as {{question: problem}}."
            )
    return Source(
        files=files,
        stamps=tuple(_stamp(file) for file in files),
        generate=str(entry.get("generate", "")),
        options=tuple(sorted((str(key), _frozen(value)) for key, value in entry.items() if key not in _SOURCE)),
        weight=None if entry.get("weight") is None else positive(f"{name}.weight", entry["weight"]),
        tag="" if entry.get("tag") is None else texts(f"{name}.tag", entry["tag"])[0],
        tags=() if entry.get("tags") is None else texts(f"{name}.tags", entry["tags"]),
        columns=tuple(sorted(named.items())),
    )


def _file(name: str, path: str) -> str:
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(
            f"{name}: there is no {path}, seen from {Path.cwd()}, rlvr. Fix: correct the path; it is relative to the folder"
            " where the run starts."
        )
    return str(found.resolve())


def _stamp(file: str) -> tuple[int, int]:
    facts = Path(file).stat()
    return facts.st_mtime_ns, facts.st_size


def _frozen(value: Any) -> Any:
    """A value that can be a key: what is read once is known by its options."""
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value


def _reward(entry: Any, name: str) -> RewardChoice:
    if isinstance(entry, str):
        entry = {"use": entry}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("use"), str):
        raise ConfigError(f"{name} is {entry!r:.120}, rlvr. Fix: a name, or a mapping with `use: NAME`.")
    weight = entry.get("weight", 1.0)
    return RewardChoice(
        use=entry["use"],
        weight=positive(f"{name}.weight", weight),
        tags=() if entry.get("tags") is None else texts(f"{name}.tags", entry["tags"]),
        options=json.dumps(
            {str(key): value for key, value in entry.items() if key not in ("use", "weight", "tags")},
            sort_keys=True,
            default=str,
        ),
    )
