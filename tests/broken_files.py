"""Model folders whose files are broken, or say what cannot be: the settings, the tokenizer, the chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attrs import frozen

WEIGHTS, SETTINGS = "model.safetensors", "tokenizer_config.json"
Breaks = Callable[[Path], object]


@frozen
class Broken:
    """A folder: what is done to a whole one. `fine`: odd, and a model all the same."""

    name: str
    breaks: Breaks
    fine: bool = False


# ---------------------------------------------------------------- whole files


def replaced(name: str, content: bytes, folder: Path) -> None:
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


def files() -> Iterator[Broken]:
    for name in FILES:
        ways: dict[str, Breaks] = {
            "is missing": partial(_removed, name),
            "is empty": partial(replaced, name, b""),
            "is cut short": partial(_cut, name),
            "is garbled": partial(_garbled, name),
            "is a folder": partial(_made_folder, name),
            "is null": partial(replaced, name, b"null"),
            "is a list": partial(replaced, name, b"[]"),
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


def said() -> Iterator[Broken]:
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
        yield Broken(f"the template {name}", partial(replaced, "chat_template.jinja", text.encode()))
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
