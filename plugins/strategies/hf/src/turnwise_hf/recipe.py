"""A recipe becomes a model folder, once: tokenizer from the environments' texts, weights from a seed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import asdict
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from turnwise.contracts.chat import Message
from turnwise.errors import ConfigError, MachineError
from turnwise_hf.config import Recipe
from turnwise_hf.folder import folder_problems
from turnwise_hf.tokenizers import build_tokenizer, save_tokenizer, shown_texts
from turnwise_torch.models import quiet

_ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
_LAYOUT = 1
"""Part of the digest: raised when this file or the tokenizers change what a recipe gives."""


def prepare_recipe(recipe: Recipe, messages: Sequence[Message], seed: int, cache: Path) -> Path:
    """The folder `cache/<digest of recipe, seed and texts>`, made unless it is there and complete. Raises ConfigError, MachineError.

    The tokenizer is trained on those of `messages` that the recipe's chat template shows.

    The folder appears by one rename, so a killed or a second process never leaves half of one. The global RNG state is left as it was.
    """
    texts = sorted(shown_texts(recipe, messages))
    if recipe.tokenizer == "word" and not texts:
        raise ConfigError("pretrain.recipe.tokenizer: word needs the environments' texts, and there are none. Fix: tokenizer: byte_bpe")
    seed = seed if recipe.seed is None else recipe.seed
    folder = Path(cache) / f"{recipe.architecture}-{_digest(recipe, texts, seed)}"
    if folder.is_dir() and not folder_problems(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
        try:
            _write(recipe, texts, seed, making)
            _move(making, folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    except OSError as error:
        raise MachineError(
            f"cannot write the model made by pretrain.recipe into {folder.parent}: {error}. Fix: free space, or another output_dir"
        ) from error
    return folder


def _digest(recipe: Recipe, texts: Sequence[str], seed: int) -> str:
    content = json.dumps([_LAYOUT, {**asdict(recipe), "seed": seed}, texts], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _write(recipe: Recipe, texts: Sequence[str], seed: int, folder: Path) -> None:
    tokenizer = build_tokenizer(recipe, texts)
    with quiet():
        build_model(recipe, tokenizer, seed).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    """The fp32 model (a PreTrainedModel), initialised from `seed` alone."""
    config_class, model_class = _ARCHITECTURES[recipe.architecture]
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size or 3 * recipe.hidden_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads or recipe.num_heads,
        "max_position_embeddings": recipe.max_position_embeddings,
        "tie_word_embeddings": recipe.tie_word_embeddings,
        "initializer_range": recipe.initializer_range,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if recipe.architecture == "qwen3":
        options["head_dim"] = recipe.hidden_size // recipe.num_heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**options))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def _move(making: Path, folder: Path) -> None:
    """Rename into place. A broken folder gives way; one that another process finished meanwhile stays (it is the same)."""
    if folder.exists() and folder_problems(folder):
        shutil.rmtree(folder)
    try:
        os.replace(making, folder)
    except OSError:
        if folder_problems(folder):
            raise
