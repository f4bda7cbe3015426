"""Rows of files: JSON lines, Parquet, and Hugging Face data sets on disk, with the place of each row for messages."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError, MachineError, did_you_mean, listed, pip_install

Row = tuple[int, dict[str, Any] | str]
"""The number of a line or row, from 1; its values by column, or what is wrong with it."""
_JSON = (".jsonl", ".json", ".ndjson")


def rows(file: str, needed: Sequence[str], wanted: Sequence[str]) -> Iterator[Row]:
    """The rows of a file, with the columns `needed` and those of `wanted` that are there.

    Raises ConfigError (no such kind of file, a needed column is missing) and MachineError (a package is)."""
    path = Path(file)
    if path.is_dir():
        return _dataset(path, needed, wanted)
    if path.suffix in _JSON:
        return _json_lines(path, needed, wanted)
    if path.suffix == ".parquet":
        return _parquet(path, needed, wanted)
    raise ConfigError(
        f"data: {file} is of no kind that is read, rlvr. Fix: one of {', '.join(_JSON)}, .parquet, or the folder of a Hugging"
        " Face data set (save_to_disk)."
    )


def _json_lines(path: Path, needed: Sequence[str], wanted: Sequence[str]) -> Iterator[Row]:
    # A column is missing where no row has it; where some have it, the others are bad rows.
    columns: dict[str, None] = {}
    found: list[Row] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = _object(line)
            if isinstance(row, dict):
                columns.update(dict.fromkeys(row))
                row = {name: row[name] for name in (*needed, *wanted) if name in row}
            elif number == 1 and line.lstrip().startswith(b"["):
                raise ConfigError(f"data: {path} holds a JSON list, rlvr. Fix: one object a line.")
            found.append((number, row))
    if columns:
        _require(path, needed, list(columns))
    yield from found


def _object(line: bytes) -> dict[str, Any] | str:
    """The object of a line, or what is wrong with it."""
    try:
        # utf-8-sig: some editors write a mark at the beginning.
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "is not UTF-8"
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    return row if isinstance(row, dict) else f"is not an object but {type(row).__name__}"


def _parquet(path: Path, needed: Sequence[str], wanted: Sequence[str]) -> Iterator[Row]:
    parquet = _package("pyarrow.parquet", "parquet", f"data: {path}")
    try:
        with parquet.ParquetFile(path) as file:
            there = file.schema_arrow.names
            _require(path, needed, there)
            number = 0
            for batch in file.iter_batches(columns=[name for name in (*needed, *wanted) if name in there]):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"data: {path} cannot be read as Parquet ({error}), rlvr. Fix: another file.") from error


def _dataset(path: Path, needed: Sequence[str], wanted: Sequence[str]) -> Iterator[Row]:
    if (splits := path / "dataset_dict.json").is_file():
        names = json.loads(splits.read_text(encoding="utf-8")).get("splits", [])
        raise ConfigError(
            f"data: {path} holds the splits {listed(names)}, rlvr. Fix: {path}/{(names or ['train'])[0]}."
        )
    if not (path / "state.json").is_file():
        raise ConfigError(
            f"data: the folder {path} holds no Hugging Face data set, rlvr. Fix: what save_to_disk wrote, or a file."
        )
    datasets = _package("datasets", "datasets", f"data: {path}")
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"data: {path} cannot be loaded ({error}), rlvr. Fix: write it anew.") from error
    _require(path, needed, found.column_names)
    found = found.select_columns([name for name in (*needed, *wanted) if name in found.column_names])
    for number, row in enumerate(found, 1):
        yield number, dict(row)


def _require(path: Path, needed: Sequence[str], there: Any) -> None:
    for name in needed:
        if name not in there:
            raise ConfigError(
                f"data: {path} has no column {name!r}, rlvr.{did_you_mean(name, there)} It has: {listed(there)}. Fix: columns:"
                " {question: NAME, answer: NAME}."
            )


def _package(name: str, extra: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MachineError(
            f"{what} needs {name.partition('.')[0]}, not installed, rlvr. Fix: {pip_install(f'turnwise-rlvr[{extra}]')}"
        ) from error
