"""What makes a folder a usable model in Hugging Face layout, found without loading torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise_hf.shards import AGAIN, read_json, weight_problems

_SETTINGS = ("tokenizer_config.json", "generation_config.json")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def folder_problems(folder: Path) -> list[str]:
    """In words, with the fix, each thing that keeps `folder` from being a complete causal language model with tokenizer and chat
    template."""
    if not folder.exists():
        return [f"the folder {folder} is not there. Fix: correct the path, or name a hub id or a recipe"]
    if not folder.is_dir():
        return [f"{folder} is a file, not a model folder. Fix: name the folder that holds config.json"]
    config = folder / "config.json"
    if not config.is_file():
        return [f"{folder} is not a model folder (it has no config.json). Fix: name a folder in Hugging Face layout"]
    facts = read_json(config)
    if not isinstance(facts, dict) or not isinstance(facts.get("model_type"), str):
        return [f"{config} is not a model's configuration (broken, or without model_type). {AGAIN}"]
    # What is compared with the weights has to be numbers.
    return [*_size_problems(config, facts)] or [*weight_problems(folder, facts), *_tokenizer_problems(folder)]


def _size_problems(config: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    text = facts.get("text_config") or facts
    for name in _SIZES if isinstance(text, dict) else ():
        value = text.get(name)
        if isinstance(value, str | float | bool) or (isinstance(value, int) and value < 1):
            yield f"{config} says {name} {value!r}. Fix: a whole number of at least 1, that of the weights"


def _tokenizer_problems(folder: Path) -> Iterator[str]:
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        yield (
            f"{folder} has no tokenizer (none of {', '.join(_TOKENIZERS)}). Fix: save the tokenizer into it"
            " with save_pretrained"
        )
        return
    broken = [
        folder / name
        for name in _SETTINGS
        if (folder / name).exists() and not isinstance(read_json(folder / name), dict)
    ]
    if broken:
        yield from (f"cannot read {path}: no JSON mapping. {AGAIN}" for path in broken)
        return
    settings = read_json(folder / "tokenizer_config.json") or {}
    if not settings.get("chat_template") and not any((folder / name).is_file() for name in _TEMPLATES):
        yield f"{folder} has no chat template. Fix: put a Jinja template into it as chat_template.jinja"
    if (folder / "tokenizer.json").is_file():
        yield from _token_problems(folder / "tokenizer.json", settings)


def _token_problems(path: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        yield f"{path} is no tokenizer (no JSON mapping with a model). {AGAIN}"
        return
    end = settings.get("eos_token")
    if isinstance(end, dict):
        end = end.get("content")
    # A token that is added when the tokenizer is loaded is one that the model never saw, so it would never stop.
    if isinstance(end, str) and "added_tokens_decoder" not in settings and end not in _tokens(content):
        yield (
            f"{path} has no token {end!r}, which tokenizer_config.json calls the end of a text. Fix: the"
            " tokenizer that the model was trained with"
        )


def _tokens(content: Mapping[str, Any]) -> set[str]:
    vocabulary = content["model"].get("vocab") or ()
    # Pairs of a piece and its score in a Unigram model, else a mapping to ids.
    pieces = {pair[0] for pair in vocabulary if pair} if isinstance(vocabulary, list) else set(vocabulary)
    return pieces | {token["content"] for token in content.get("added_tokens") or () if "content" in token}
