"""The parameters that `plan` counts from a config.json are those of the real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from turnwise.planning.facts import read_facts

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 4,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1],
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": False}),
    ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": False}),
    ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("MistralConfig", "MistralForCausalLM", {"tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("config", "model", "more"), CASES)
def test_a_decoder(config: str, model: str, more: dict[str, Any], tmp_path: Path) -> None:
    settings = getattr(transformers, config)(**{**SIZES, **more})
    settings.save_pretrained(tmp_path)
    facts = read_facts(tmp_path / "config.json")
    assert facts is not None
    assert facts.parameters == sum(p.numel() for p in getattr(transformers, model)(settings).parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_a_vision_language_model(tied: bool, tmp_path: Path) -> None:
    text = {**SIZES, "tie_word_embeddings": tied}
    settings = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    settings.save_pretrained(tmp_path)
    facts = read_facts(tmp_path / "config.json")
    assert facts is not None
    assert facts.parameters == sum(
        p.numel() for p in transformers.Qwen2_5_VLForConditionalGeneration(settings).parameters()
    )
