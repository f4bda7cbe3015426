"""The weights of a model folder by their headers alone: which files there are, whether they are whole, and whether they
are those of the model that config.json describes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "Fix: fetch or export the folder again"
_WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Bytes of a number; the format has further dtypes, of less than a byte."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def read_json(path: Path) -> Any:
    """The content of a JSON file, None where there is none to be had."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`: the one, or the shards that its index names (whether there or not), or
    none."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    return [folder / name for name in sorted(set(_map(folder).values()))]


def _map(folder: Path) -> dict[str, str]:
    """The name of every weight and of its file, as far as the index is one."""
    index = read_json(folder / INDEX)
    names = index.get("weight_map") if isinstance(index, dict) else None
    return {str(name): str(file) for name, file in names.items()} if isinstance(names, dict) else {}


def header(path: Path) -> dict[str, Any]:
    """A safetensors file's header: name → dtype, shape, data_offsets. Raises ValueError for a file that is cut short or
    no such file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # Before the header is read: a damaged length may ask for exabytes.
        if size < 8 or length > size - 8:
            raise ValueError("cut short, or no safetensors file")
        entries = json.loads(file.read(length))
    if not isinstance(entries, dict):
        raise ValueError("its header is no mapping")
    # The format's one entry that is no tensor.
    entries.pop("__metadata__", None)
    end = 0
    # In the order of the file: tensors must follow each other without a gap, as safetensors itself demands.
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, after = entry["data_offsets"]
        width, count = _WIDTHS.get(entry["dtype"]), math.prod(entry["shape"])
        if begin != end or any(axis < 0 for axis in entry["shape"]) or (width and after - begin != width * count):
            raise ValueError(f"the header's shape, dtype and offsets of {name!r} do not fit together")
        end = after
    if size != 8 + length + end:
        raise ValueError(f"{size} bytes where its header says {8 + length + end}: cut short")
    return entries


def weight_problems(folder: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    """One line for each thing that is wrong with the weights of `folder`, whose config.json says `facts`."""
    files = weight_files(folder)
    if not files:
        old = " (pytorch_model.bin is not read)" if list(folder.glob("pytorch_model*.bin")) else ""
        yield (
            f"{folder} has no weights as safetensors{old}. Fix: save the model with save_pretrained of a"
            " recent transformers"
        )
    inside: dict[str, dict[str, Any]] = {}
    for path in files:
        if path.parent != folder:
            yield f"the index of {folder} names {path}, which is not in it. {AGAIN}"
        elif not path.is_file():
            yield f"{folder} lacks the shard {path.name} that its index names. Fix: fetch the folder again"
        else:
            try:
                inside[path.name] = header(path)
            except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
                yield f"cannot read {path}: {error or type(error).__name__}. {AGAIN}"
    # What is missing would only show again, as weights that are not there.
    if len(inside) < len(files):
        return
    if files and files[0].name != WEIGHTS:
        strayed = [(name, file) for name, file in _map(folder).items() if name not in inside[file]]
        if strayed:
            name, file = strayed[0]
            yield (f"{folder / file} lacks {name!r}, which {INDEX} places there ({len(strayed)} such weights). {AGAIN}")
            return
    yield from _unfit(folder, {name: entry for part in inside.values() for name, entry in part.items()}, facts)


def _unfit(folder: Path, entries: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    """Weights that are not those of the model: of another vocabulary or width, of fewer layers, of no floating
    point."""
    # Vision-language models keep the language model's numbers in a block of their own.
    config = facts.get("text_config") or facts
    for name, entry in entries.items():
        wanted = [config.get("vocab_size"), config.get("hidden_size")]
        if name.endswith(".embed_tokens.weight") and all(wanted) and entry["shape"] != wanted:
            yield (
                f"{folder}: {name!r} is {entry['shape']}, and config.json says vocab_size {wanted[0]},"
                f" hidden_size {wanted[1]}. Fix: the config.json of these weights"
            )
        if not entry["dtype"].startswith(("F", "BF")) and "quantization_config" not in facts:
            yield (
                f"{folder}: {name!r} is of dtype {entry['dtype']}, and config.json says nothing of a"
                " quantization. Fix: weights of floating point"
            )
            return
    layers = {int(found[1]) for name in entries if (found := _LAYER.search(name))}
    count = config.get("num_hidden_layers")
    if layers and count is not None and max(layers) + 1 < count:
        yield (
            f"{folder} holds weights of {max(layers) + 1} layers, and config.json says num_hidden_layers"
            f" {count}. Fix: the config.json of these weights"
        )
