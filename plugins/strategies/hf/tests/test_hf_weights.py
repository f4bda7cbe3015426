"""Weights from a folder go in whole or not at all; models that cached decoding would get wrong are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GemmaConfig, MistralConfig, Qwen2Config

from turnwise.errors import EngineError
from turnwise_hf.weights import check_model, load_into, stream_into
from turnwise_torch.models import load_causal_lm
from turnwise_torch.stream import buckets


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_copied_in_place(make: Callable[..., Path], tied: bool) -> None:
    model = load_causal_lm(make(tie_word_embeddings=tied), "fp32", "sdpa")
    other = make(tie_word_embeddings=tied, seed=8)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    load_into(model, other)
    assert equal(state(model), state(load_causal_lm(other, "fp32", "sdpa")))
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_shards_and_tied_names_written_twice_are_taken(make: Callable[..., Path], tmp_path: Path) -> None:
    model = load_causal_lm(make(), "fp32", "sdpa")
    weights = state(load_causal_lm(make(seed=8), "fp32", "sdpa"))
    names = sorted(weights)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(names)
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: weights[name] for name in part}, tmp_path / f"model-{number}.safetensors")
    index = {name: f"model-{int(name in names[5:])}.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    load_into(model, tmp_path)
    assert equal(state(model), weights)


def _rename(weights: dict[str, torch.Tensor]) -> None:
    weights["model.normal.weight"] = weights.pop("model.norm.weight")


def _drop(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.layers.1.self_attn.q_proj.weight"]


def _reshape(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = torch.ones(3)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_rename, r"hold 1 names that the model does not have, such as 'model\.normal\.weight'"),
        (_drop, r"lack 1 of the model's tensors, such as 'model\.layers\.1\.self_attn\.q_proj\.weight'"),
        (_reshape, r"have 'model\.norm\.weight' of shape \(3,\), the model's is \(32,\)"),
    ],
)
def test_a_wrong_folder_changes_nothing(
    make: Callable[..., Path], tmp_path: Path, harm: Callable[[dict[str, Any]], None], message: str
) -> None:
    model = load_causal_lm(make(), "fp32", "sdpa")
    before = state(model)
    weights = load_file(make(seed=8) / "model.safetensors")
    harm(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=message):
        load_into(model, tmp_path)
    assert equal(state(model), before)


def test_a_folder_without_weights_or_cut_short_is_refused(make: Callable[..., Path], tmp_path: Path) -> None:
    model = load_causal_lm(make(), "fp32", "sdpa")
    with pytest.raises(EngineError, match="no safetensors weights of a whole model"):
        load_into(model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes((make() / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(EngineError, match="cannot read the weights"):
        load_into(model, tmp_path)


SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def build(config: Any, attention: str = "sdpa") -> Any:
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def test_models_of_full_attention_pass_whatever_their_head_size() -> None:
    with torch.no_grad():
        check_model(build(Qwen2Config(**SIZES)))
        check_model(build(GemmaConfig(**SIZES, head_dim=24)))


@pytest.mark.parametrize(
    ("config", "attention", "message"),
    [
        (
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=0),
            "sdpa",
            r"Qwen2ForCausalLM \(qwen2\) has layers of sliding_attention",
        ),
        (MistralConfig(**SIZES, sliding_window=4), "sdpa", "MistralForCausalLM .* has layers of sliding_attention"),
        (Qwen2Config(**SIZES), "flex_attention", "attn_implementation 'flex_attention' of Qwen2ForCausalLM"),
    ],
)
def test_what_cached_decoding_would_get_wrong_is_refused_by_name(config: Any, attention: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check_model(build(config, attention))


def test_logits_changed_after_the_head_are_noticed() -> None:
    model = build(Qwen2Config(**SIZES, initializer_range=0.5))
    forward = model.forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = torch.tanh(output.logits)
        return output

    model.forward = capped
    with pytest.raises(EngineError, match="differs from the model's own forward pass"):
        check_model(model)


# --- experts


@pytest.fixture
def pair(make: Callable[..., Path]) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A model with experts, another of its shape, and what transformers saved of the other."""
    folders = [make(architecture="qwen3_moe", tie_word_embeddings=False, seed=seed) for seed in (0, 8)]
    ours, other = (load_causal_lm(folder, "fp32", "sdpa") for folder in folders)
    return ours, other, load_file(folders[1] / "model.safetensors")


@pytest.mark.parametrize("size", [1, 10**9])
def test_experts_that_stream_one_by_one_are_put_into_the_fused_tensors_in_place(pair: Any, size: int) -> None:
    model, other, saved = pair
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in saved
    stream_into(model, buckets(((name, saved[name]) for name in sorted(saved, reverse=True)), size))
    assert equal(state(model), state(other))
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_fused_experts_are_taken_too(pair: Any, tmp_path: Path) -> None:
    model, other, _ = pair
    before, fused = state(model), state(other)
    assert "model.layers.1.mlp.experts.gate_up_proj" in fused
    stream_into(model, buckets(fused.items(), 1))
    assert equal(state(model), fused)
    save_file(before, tmp_path / "model.safetensors")
    load_into(model, tmp_path)
    assert equal(state(model), before)


def test_experts_of_a_layer_that_files_share_out_are_read_together(pair: Any, tmp_path: Path) -> None:
    model, other, saved = pair
    index = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(saved)}
    for file in set(index.values()):
        save_file({name: tensor for name, tensor in saved.items() if index[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    load_into(model, tmp_path)
    assert equal(state(model), state(other))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            {"3.up_proj": None},
            r"lack 1 of the model's tensors, such as 'model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight'",
        ),
        (
            {"gate_proj": None, "up_proj": None},
            r"lack 8 of the model's tensors, such as 'model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight'",
        ),
        (
            {"2.down_proj": torch.ones(3)},
            r"'model\.layers\.1\.mlp\.experts\.2\.down_proj\.weight' of shape \(3,\), the model",
        ),
    ],
)
def test_experts_that_are_missing_or_of_another_shape_are_reported_by_the_name_of_one(
    pair: Any, tmp_path: Path, harm: dict[str, Any], message: str
) -> None:
    model, _, saved = pair
    before = state(model)
    for name in [name for name in saved if ".1.mlp.experts." in name]:
        for part, instead in harm.items():
            if name.endswith(f".{part}.weight"):
                saved[name] = instead
    saved = {name: tensor for name, tensor in saved.items() if tensor is not None}
    with pytest.raises(EngineError, match=message):
        stream_into(model, buckets(saved.items(), 1))
    model.load_state_dict(before)
    save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=message):
        load_into(model, tmp_path)
    assert equal(state(model), before)


def test_experts_that_come_in_several_buckets_are_refused(pair: Any) -> None:
    model, _, saved = pair
    with pytest.raises(
        EngineError,
        match=(
            r"lack 3 of the model's tensors, such as '.*experts\.1\.down_proj\.weight' beside"
            r" '.*experts\.0\.down_proj\.weight'"
        ),
    ):
        stream_into(model, [[(name, saved[name])] for name in sorted(saved)])
