"""Broken model folders: `python tests/broken_models.py` names each as `pretrain` for `check` and `train`, and prints what
should not be.

Each is a tiny model's folder of which one thing was broken. The answer is a line that names the folder and the fix
before anything is trained, never a traceback, a success that is none, or a hang."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors.torch import load_file, save_file

from turnwise.testing.runs import LAKE, written
from turnwise_hf.config import recipe_from
from turnwise_hf.recipe import prepare_recipe

NAME = "model-under-test"
SECONDS = 10
WEIGHTS, INDEX, SETTINGS = "model.safetensors", "model.safetensors.index.json", "tokenizer_config.json"
RECIPE = {
    "recipe": {
        "architecture": "qwen2",
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "vocab_size": 400,
        "tokenizer": "byte_bpe",
    }
}
Breaks = Callable[[Path], object]


@frozen
class Broken:
    """A folder: what is done to a whole one. `fine`: odd, and a model all the same."""

    name: str
    breaks: Breaks
    fine: bool = False


# ---------------------------------------------------------------- whole files


def _replaced(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)


def _removed(name: str, folder: Path) -> None:
    (folder / name).unlink()


def _cut(name: str, folder: Path) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])


def _garbled(name: str, folder: Path) -> None:
    """Every third byte is another one: no UTF-8, no JSON."""
    content = bytearray((folder / name).read_bytes())
    content[1::3] = bytes(byte ^ 0xA5 for byte in content[1::3])
    (folder / name).write_bytes(content)


def _made_folder(name: str, folder: Path) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


FILES = ("config.json", "tokenizer.json", SETTINGS, "generation_config.json", WEIGHTS)
OPTIONAL = {  # what a folder may lack: the class is found by the architecture, and the template lies beside it
    (SETTINGS, "is missing"),
    ("generation_config.json", "is missing"),
}


def _files() -> Iterator[Broken]:
    for name in FILES:
        ways: dict[str, Breaks] = {
            "is missing": partial(_removed, name),
            "is empty": partial(_replaced, name, b""),
            "is cut short": partial(_cut, name),
            "is garbled": partial(_garbled, name),
            "is a folder": partial(_made_folder, name),
            "is null": partial(_replaced, name, b"null"),
            "is a list": partial(_replaced, name, b"[]"),
        }
        yield from (Broken(f"{name} {way}", breaks, (name, way) in OPTIONAL) for way, breaks in ways.items())


# ---------------------------------------------------------------- what the files say


def edited(name: str, folder: Path, **values: Any) -> None:
    """Keys of a JSON file set, or left out where the value is `...`."""
    content = {**json.loads((folder / name).read_text()), **values}
    (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


CONFIG: dict[str, dict[str, Any]] = {
    "an unknown model_type": {"model_type": "no_such_model"},
    "a model_type that is a number": {"model_type": 3},
    "no model_type": {"model_type": ...},
    "the model_type of an encoder": {"model_type": "bert", "architectures": ["BertModel"]},
    "a width of 0": {"hidden_size": 0},
    "a negative width": {"hidden_size": -16},
    "a width that is text": {"hidden_size": "wide"},
    "a width of the next size": {"hidden_size": 32},
    "a width of 10⁹": {"hidden_size": 10**9},
    "a layer too many": {"num_hidden_layers": 3},
    "10⁷ layers": {"num_hidden_layers": 10**7},
    "a layer too few": {"num_hidden_layers": 1},
    "no layer": {"num_hidden_layers": 0},
    "-1 layers": {"num_hidden_layers": -1},
    "no heads": {"num_attention_heads": 0},
    "heads that do not divide the width": {"num_attention_heads": 3},
    "more key heads": {"num_key_value_heads": 4},
    "another MLP": {"intermediate_size": 7},
    "a vocabulary of 0": {"vocab_size": 0},
    "a smaller vocabulary": {"vocab_size": 100},
    "a larger vocabulary": {"vocab_size": 500},
    "a vocabulary of 10¹²": {"vocab_size": 10**12},
    "a vocabulary that is text": {"vocab_size": "many"},
    "no vocabulary": {"vocab_size": ...},
    "an unknown activation": {"hidden_act": "no_such_function"},
    "an unknown dtype": {"dtype": "float7"},
    "an unknown kind of layer": {"layer_types": ["odd_attention", "full_attention"]},
    "odd rotary settings": {"rope_parameters": {"rope_type": "no_such_rope"}, "rope_scaling": {"rope_type": "no_such"}},
    "an unknown quantization": {"quantization_config": {"quant_method": "no_such_method"}},
    "code of its own": {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}},
    "an end that is text": {"eos_token_id": "end"},
    "an end that no tokenizer has": {"eos_token_id": 10**6},
}
TOKENIZER: dict[str, dict[str, Any]] = {
    "a tokenizer's class that is not there": {"tokenizer_class": "NoSuchTokenizer"},
    "a tokenizer's class that is a number": {"tokenizer_class": 3},
    "an end of text that is a number": {"eos_token": 3},
    "an end of text that is a list": {"eos_token": ["x"]},
    "special tokens that are text": {"extra_special_tokens": "x"},
    "code of the tokenizer's own": {"auto_map": {"AutoTokenizer": ["code.Slow", "code.Fast"]}},
}
TEMPLATES = {
    "is empty": "",
    "is no Jinja": "{% for message in messages %}",
    "raises": "{{ raise_exception('no') }}",
    "names what is not there": "{{ messages[9]['content'] }}",
    "divides by zero": "{{ 1 / 0 }}",
    "leaves the answers out": "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
    "writes the answers twice": "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}",
    "calls itself for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


def _no_template(folder: Path) -> None:
    _removed("chat_template.jinja", folder)


def _template_of(value: Any, folder: Path) -> None:
    _no_template(folder)
    edited(SETTINGS, folder, chat_template=value)


def _pipeline(change: Callable[[dict[str, Any]], object], folder: Path) -> None:
    """tokenizer.json with a change."""
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))


def _without_special(content: dict[str, Any]) -> None:
    """The tokens that the template writes are no tokens."""
    gone = {token["content"] for token in content["added_tokens"]}
    content["added_tokens"] = []
    content["model"]["vocab"] = {text: number for text, number in content["model"]["vocab"].items() if text not in gone}


def _said() -> Iterator[Broken]:
    fine = {  # what nothing here reads, or what transformers has another way for
        "an end that no tokenizer has",
        "an unknown dtype",
        "an unknown quantization",
        "code of its own",
        "a tokenizer's class that is not there",
        "code of the tokenizer's own",
    }
    for name, values in CONFIG.items():
        yield Broken(f"config.json says {name}", partial(edited, "config.json", **values), name in fine)
    for name, values in TOKENIZER.items():
        yield Broken(f"{SETTINGS} says {name}", partial(edited, SETTINGS, **values), name in fine)
    for name, text in TEMPLATES.items():
        yield Broken(f"the template {name}", partial(_replaced, "chat_template.jinja", text.encode()))
    yield Broken("no chat template", _no_template)
    yield Broken("a chat template that is a number", partial(_template_of, 3))
    yield Broken("a chat template that is a mapping", partial(_template_of, {"a": "b"}))
    pipelines: dict[str, Callable[[dict[str, Any]], object]] = {
        "no model": lambda content: content.pop("model"),
        "an unknown model": lambda content: content["model"].update(type="NoSuchModel"),
        "no vocabulary": lambda content: content["model"].update(vocab={}, merges=[]),
        "merges of what is not there": lambda content: content["model"].update(merges=[["qq", "zz"]]),
        "ids beyond the model": lambda content: content["model"]["vocab"].update(a=10**6),
        "more tokens than the model": lambda content: content["model"]["vocab"].update(
            {f"more{i}": 1000 + i for i in range(50)}
        ),
        "an id beyond 32 bits": lambda content: content["model"]["vocab"].update(a=2**40),
    }
    yield from (Broken(f"tokenizer.json with {name}", partial(_pipeline, change)) for name, change in pipelines.items())
    yield Broken("tokenizer.json without special tokens", partial(_pipeline, _without_special))


# ---------------------------------------------------------------- weights


def weights(change: Callable[[dict[str, Any]], object], folder: Path) -> None:
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


def _weighed() -> Iterator[Broken]:
    for fine, changes in ((False, TENSORS), (True, FINE)):
        yield from (Broken(f"weights {name}", partial(weights, change), fine) for name, change in changes.items())
    yield from (Broken(f"a header with {name}", partial(_header, change)) for name, change in HEADERS.items())
    yield Broken("a header longer than the file", partial(_replaced, WEIGHTS, (2**60).to_bytes(8, "little") + b"{}"))
    yield Broken("a header that is a list", partial(_replaced, WEIGHTS, (2).to_bytes(8, "little") + b"[]"))
    yield from (Broken(f"an index with {name}", partial(_sharded, change)) for name, change in INDICES.items())
    yield Broken("two shards", partial(_sharded, lambda index: None), fine=True)
    yield Broken("two shards swapped", _shards_swapped)
    yield Broken("weights of qwen2 as llama", partial(_as, "llama", "LlamaForCausalLM"))
    yield Broken("weights of qwen2 as qwen3", partial(_as, "qwen3", "Qwen3ForCausalLM"))
    yield Broken("weights of PyTorch alone", lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"))


def broken() -> Iterator[Broken]:
    """All of them."""
    yield Broken("nothing", lambda folder: None, fine=True)
    yield from _files()
    yield from _said()
    yield from _weighed()


# ---------------------------------------------------------------- the judge


def script(name: str) -> Any:
    """A script beside this file."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def whole(cache: Path) -> Path:
    """A model folder of which nothing is broken."""
    texts = [{"role": "user", "content": "a lake of ice and holes, the goal is up, down, left or right"}]
    return prepare_recipe(recipe_from(RECIPE), texts, 0, cache)


def faults_of(command: str, result: tuple[int, str, str, BaseException | None, float], about: str) -> Iterator[str]:
    """What should not be of what a command answered: every line of an error holds `about` and the fix."""
    code, _, err, raised, seconds = result
    if raised is not None:
        yield f"{command}: traceback: {type(raised).__name__}: {raised!s:.200}"
    elif seconds > SECONDS:
        yield f"{command}: {seconds:.0f} s"
    lines = [line for line in err.splitlines() if line.startswith(("error: ", "config: ", "machine: "))]
    if bool(lines) != bool(code):
        yield f"{command}: exit {code} and {len(lines)} errors: {err[-300:]}"
    for line in lines:
        if "Fix: " not in line or about not in line or "the run failed" in line or len(line) > 1000:
            yield f"{command}: {line:.400}"


def judge(one: Broken, model: Path, run: Callable[[list[str]], Any]) -> list[str]:
    """What should not be, of a folder in the current folder, which is left empty. `model`: a whole one; `run`: of
    mutated_yamls."""
    folder = Path(NAME)
    shutil.copytree(model, folder)
    one.breaks(folder)
    Path("run.yaml").write_text(written(LAKE, {"pretrain": f"./{NAME}", "max_steps": 1, "save_steps": 0}))
    try:
        results = {"check": run(["check", "run.yaml"])}
        if results["check"][0] == 0:
            results["train"] = run(["train", "run.yaml"])
        faults = [fault for command, result in results.items() for fault in faults_of(command, result, NAME)]
        if one.fine == any(code for code, *_ in results.values()):
            faults.append(f"refused: {results}" if one.fine else "success, and it is wrong")
        if not one.fine and Path("out/metrics.jsonl").is_file() and Path("out/metrics.jsonl").read_text():
            faults.append("it trained before it was refused")
        return faults
    finally:
        for path in Path().iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main_by_hand() -> int:
    """Judge all, print every fault; how many have one."""
    run, bad, every = script("mutated_yamls").run, 0, list(broken())
    with tempfile.TemporaryDirectory() as folder:
        model = whole(Path(folder) / "model")
        (Path(folder) / "run").mkdir()
        os.chdir(Path(folder) / "run")
        for one in every:
            began = time.monotonic()
            if faults := judge(one, model, run):
                bad += 1
                print(f"--- {one.name} ({time.monotonic() - began:.1f} s)\n" + "\n".join(faults), flush=True)
        os.chdir("/")
    print(f"{len(every)} model folders, {bad} with faults")
    return bad


if __name__ == "__main__":
    sys.exit(1 if main_by_hand() else 0)
