"""What makes a folder a usable model in Hugging Face layout, found without loading torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def folder_problems(folder: Path) -> list[str]:
    """One line for each thing that keeps `folder` from being a complete causal language model with tokenizer and chat
    template."""
    if not folder.exists():
        return [f"pretrain: the folder {folder} is not there. Fix: correct the path, or name a hub id or a recipe"]
    if not folder.is_dir():
        return [f"pretrain: {folder} is a file, not a model folder. Fix: name the folder that holds config.json"]
    config = folder / "config.json"
    if not config.is_file():
        return [
            f"pretrain: {folder} is not a model folder (it has no config.json). Fix: name a folder in Hugging Face"
            " layout"
        ]
    facts = _json(config)
    if not isinstance(facts, dict) or "model_type" not in facts:
        return [
            f"pretrain: {config} is not a model's configuration (broken, or without model_type). Fix: fetch or export"
            " the model again"
        ]
    return [*_weight_problems(folder), *_tokenizer_problems(folder)]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`: the one, or the shards that its index names (whether there or not), or
    none."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = _json(folder / _INDEX)
    names = index.get("weight_map", {}) if isinstance(index, dict) else {}
    return [folder / name for name in sorted(set(names.values()))]


def header(path: Path) -> dict[str, Any]:
    """A safetensors file's header: name → dtype, shape, data_offsets. Raises ValueError for a file that is cut short or
    no such file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError("cut short, or no safetensors file")
        entries = json.loads(file.read(length))
    # The format's one entry that is no tensor.
    entries.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size != 8 + length + end:
        raise ValueError(f"{size} bytes where its header says {8 + length + end}: cut short")
    return entries


def _weight_problems(folder: Path) -> Iterator[str]:
    files = weight_files(folder)
    if not files:
        old = " (pytorch_model.bin is not read)" if list(folder.glob("pytorch_model*.bin")) else ""
        yield (
            f"pretrain: {folder} has no weights as safetensors{old}. Fix: save the model with save_pretrained of a"
            " recent transformers"
        )
    for path in files:
        if not path.is_file():
            yield f"pretrain: {folder} lacks the shard {path.name} that its index names. Fix: fetch the folder again"
            continue
        try:
            header(path)
        except (ValueError, KeyError, TypeError, OSError) as error:
            yield f"pretrain: cannot read {path}: {error}. Fix: fetch or export the folder again"


def _tokenizer_problems(folder: Path) -> Iterator[str]:
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        yield (
            f"pretrain: {folder} has no tokenizer (none of {', '.join(_TOKENIZERS)}). Fix: save the tokenizer into it"
            " with save_pretrained"
        )
        return
    settings = _json(folder / "tokenizer_config.json")
    inside = isinstance(settings, dict) and bool(settings.get("chat_template"))
    if not inside and not any((folder / name).is_file() for name in _TEMPLATES):
        yield f"pretrain: {folder} has no chat template. Fix: put a Jinja template into it as chat_template.jinja"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
