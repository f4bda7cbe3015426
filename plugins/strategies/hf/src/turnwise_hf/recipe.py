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
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from turnwise.contracts.chat import Message
from turnwise.errors import CheckpointError, ConfigError, MachineError
from turnwise_hf.config import Recipe
from turnwise_hf.folder import folder_problems
from turnwise_hf.tokenizers import (
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
    build_tokenizer,
    save_tokenizer,
    shown_texts,
    template_of,
)
from turnwise_torch.models import quiet

_ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
}
_LAYOUT = 1
"""Part of the digest: raised when this file or the tokenizers change what a recipe gives."""


def prepare_recipe(
    recipe: Recipe, messages: Sequence[Message], seed: int, cache: Path, tokenizer: Path | None = None
) -> Path:
    """The folder `cache/<digest of recipe, seed and texts>`, made unless it is there and complete. Raises ConfigError,
    MachineError.

    The tokenizer is that of the model folder `tokenizer`, with the recipe's chat template; without one it is trained on
    those of `messages` that the template shows. Raises CheckpointError for a folder without one.

    The folder appears by one rename, so a killed or a second process never leaves half of one. The global RNG state is
    left as it was.
    """
    texts = _files(tokenizer) if tokenizer is not None else sorted(shown_texts(recipe, messages))
    if recipe.tokenizer == "word" and not texts:
        raise ConfigError(
            "pretrain.recipe.tokenizer: word needs the environments' texts, and there are none. Fix: tokenizer:"
            " byte_bpe"
        )
    seed = seed if recipe.seed is None else recipe.seed
    folder = Path(cache) / f"{recipe.architecture}-{_digest(recipe, texts, seed)}"
    if folder.is_dir() and not folder_problems(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
        try:
            _write(
                recipe,
                _loaded(tokenizer, recipe) if tokenizer is not None else build_tokenizer(recipe, texts),
                seed,
                making,
            )
            _move(making, folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    except OSError as error:
        raise MachineError(
            f"cannot write the model made by pretrain.recipe into {folder.parent}: {error}. Fix: free space, or another"
            " output_dir"
        ) from error
    return folder


def _digest(recipe: Recipe, texts: Sequence[str], seed: int) -> str:
    content = json.dumps([_LAYOUT, {**asdict(recipe), "seed": seed}, texts], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _files(folder: Path) -> list[str]:
    """What a saved tokenizer is, for the digest."""
    try:
        return [(folder / name).read_text(encoding="utf-8") for name in ("tokenizer.json", "tokenizer_config.json")]
    except OSError as error:
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be read: {error}. Fix: resume from another checkpoint."
        ) from error


def _loaded(folder: Path, recipe: Recipe) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.chat_template = template_of(recipe)
    return tokenizer


def _write(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, seed: int, folder: Path) -> None:
    with quiet():
        build_model(recipe, tokenizer, seed).save_pretrained(folder)
    if recipe.architecture == "qwen2_5_vl":
        Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=recipe.max_pixels).save_pretrained(folder)
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
        # No token stands for the beginning; Llama's default would name the id of another.
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if recipe.architecture in ("qwen3", "qwen3_moe"):
        # Qwen3's default is 128, whatever the hidden size.
        options["head_dim"] = recipe.hidden_size // recipe.num_heads
    if recipe.architecture == "qwen3_moe":
        options |= {
            "num_experts": recipe.num_experts,
            "num_experts_per_tok": recipe.num_experts_per_tok,
            "norm_topk_prob": True,
        }
        options["moe_intermediate_size"] = recipe.moe_intermediate_size or recipe.hidden_size
    if recipe.architecture == "qwen2_5_vl":
        options = _with_vision(recipe, options, tokenizer)
    # The run's own random state must not depend on whether the folder was there already.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**options))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def _with_vision(recipe: Recipe, text: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The options of a vision-language model around those of its text model."""
    half = recipe.hidden_size // recipe.num_heads // 2
    # Time, height, width: the shares of Qwen2.5-VL.
    sections = [
        half - 2 * (3 * half // 8),
        3 * half // 8,
        3 * half // 8,
    ]
    vision = {
        "depth": recipe.num_layers,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": text["intermediate_size"],
        "num_heads": recipe.num_heads,
        "out_hidden_size": recipe.hidden_size,
        "window_size": 112,
        "fullatt_block_indexes": [recipe.num_layers - 1],
        "initializer_range": recipe.initializer_range,
    }
    names = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    return {
        "text_config": {**text, "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": sections}},
        "vision_config": vision,
        "tie_word_embeddings": recipe.tie_word_embeddings,
        "dtype": "float32",
        **{key: tokenizer.convert_tokens_to_ids(name) for key, name in names.items()},
    }


def _move(making: Path, folder: Path) -> None:
    """Rename into place. A broken folder gives way; one that another process finished meanwhile stays (it is the
    same)."""
    if folder.exists() and folder_problems(folder):
        shutil.rmtree(folder)
    try:
        os.replace(making, folder)
    except OSError:
        if folder_problems(folder):
            raise
