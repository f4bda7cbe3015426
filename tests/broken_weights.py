"""Model folders whose weights are broken: tensors, headers, the index of shards, and weights of another model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from broken_files import WEIGHTS, Broken, edited, replaced
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"


def _weights(change: Callable[[dict[str, Any]], object], folder: Path) -> None:
    """The weights with a change."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def _first(tensors: dict[str, Any]) -> str:
    return next(name for name in sorted(tensors) if name.endswith("down_proj.weight"))


def _set(value: float) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors[_first(tensors)][0].fill_(value)


def _cast(dtype: torch.dtype) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in list(tensors.items())})


def _renamed(old: str, new: str) -> Callable[[dict[str, Any]], object]:
    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


TENSORS: dict[str, Callable[[dict[str, Any]], object]] = {
    "with NaN": _set(float("nan")),
    "with inf": _set(float("inf")),
    "all NaN": lambda tensors: [tensor.fill_(float("nan")) for tensor in tensors.values()],
    "of int8": _cast(torch.int8),
    "of booleans": _cast(torch.bool),
    "without one": lambda tensors: tensors.pop(_first(tensors)),
    "without embeddings": lambda tensors: tensors.pop("model.embed_tokens.weight"),
    "without any": lambda tensors: tensors.clear(),
    "under other names": _renamed("mlp", "feed_forward"),
    "under the names of a wrapper": _renamed("model.", "module.inner.model."),
    "with one of another shape": lambda tensors: tensors.update({_first(tensors): torch.ones(3, 5)}),
    "with one turned": lambda tensors: tensors.update({_first(tensors): tensors[_first(tensors)].T.contiguous()}),
    "with one of no dimension": lambda tensors: tensors.update({_first(tensors): torch.tensor(1.0)}),
    "with a norm more": lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}),
}
FINE: dict[str, Callable[[dict[str, Any]], object]] = {
    "of bf16": _cast(torch.bfloat16),
    "of fp64": _cast(torch.float64),
    "with rotary frequencies": lambda tensors: tensors.update(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    ),
}


def _header(change: Callable[[dict[str, Any]], object], folder: Path) -> None:
    """The file of weights with another header."""
    content = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    change(entries)
    text = json.dumps(entries).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def _of(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda entries: entries["model.norm.weight"].update(values)


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "an unknown dtype": _of(dtype="F7"),
    "a negative size": _of(shape=[-16]),
    "a size that is text": _of(shape=["many"]),
    "a shape beyond its bytes": _of(shape=[10**12]),
    "offsets beyond the file": _of(data_offsets=[0, 10**12]),
    "offsets turned round": _of(data_offsets=[64, 0]),
    "overlapping offsets": _of(data_offsets=[0, 64]),
    "no offsets": lambda entries: entries["model.norm.weight"].pop("data_offsets"),
    "an entry that is a list": lambda entries: entries.update({"model.norm.weight": []}),
}


def _sharded(change: Callable[[dict[str, Any]], object], folder: Path) -> None:
    """The weights in two files and an index, which is changed."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    index: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": {}}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(part, file)
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


INDICES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no weight_map": lambda index: index.pop("weight_map"),
    "an empty weight_map": lambda index: index["weight_map"].clear(),
    "a weight_map that is a list": lambda index: index.update(weight_map=[1]),
    "numbers as files": lambda index: index.update(weight_map=dict.fromkeys(index["weight_map"], 1)),
    "a shard that is absent": lambda index: index["weight_map"].update({"model.norm.weight": "model-3.safetensors"}),
    "a file outside": lambda index: index["weight_map"].update({"model.norm.weight": "../other.safetensors"}),
    "a weight that no shard holds": lambda index: index["weight_map"].update(
        {"model.layers.0.self_attn.q_norm.weight": "model-00001-of-00002.safetensors"}
    ),
    "half of the weights": lambda index: index.update(weight_map=dict(list(index["weight_map"].items())[:5])),
}


def _shards_swapped(folder: Path) -> None:
    _sharded(lambda index: None, folder)
    one, other = sorted(folder.glob("model-*.safetensors"))
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)


def _as(model_type: str, architecture: str, folder: Path) -> None:
    edited("config.json", folder, model_type=model_type, architectures=[architecture])


def weighed() -> Iterator[Broken]:
    for fine, changes in ((False, TENSORS), (True, FINE)):
        yield from (Broken(f"weights {name}", partial(_weights, change), fine) for name, change in changes.items())
    yield from (Broken(f"a header with {name}", partial(_header, change)) for name, change in HEADERS.items())
    yield Broken("a header longer than the file", partial(replaced, WEIGHTS, (2**60).to_bytes(8, "little") + b"{}"))
    yield Broken("a header that is a list", partial(replaced, WEIGHTS, (2).to_bytes(8, "little") + b"[]"))
    yield from (Broken(f"an index with {name}", partial(_sharded, change)) for name, change in INDICES.items())
    yield Broken("two shards", partial(_sharded, lambda index: None), fine=True)
    yield Broken("two shards swapped", _shards_swapped)
    yield Broken("weights of qwen2 as llama", partial(_as, "llama", "LlamaForCausalLM"))
    yield Broken("weights of qwen2 as qwen3", partial(_as, "qwen3", "Qwen3ForCausalLM"))
    yield Broken("weights of PyTorch alone", lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"))
