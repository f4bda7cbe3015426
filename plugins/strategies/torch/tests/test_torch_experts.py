"""Experts leave one by one, as transformers writes checkpoints, to the bit; adapters beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from turnwise.contracts.train import Lora
from turnwise.data.rows import Update
from turnwise.errors import ConfigError
from turnwise_torch.experts import CheckpointForm, to_checkpoint
from turnwise_torch.fixtures import tiny_model
from turnwise_torch.models import load_causal_lm
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.stream import buckets

Build = Callable[..., TorchStrategy]
SIZES = {
    **{
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    **{
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    },
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # A dense layer among them, and more experts than the order of texts keeps apart.
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "num_experts": 12,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 3}),  # whose files have other names, too
}


def moe(folder: Path, family: str = "qwen3_moe", seed: int = 0, **changes: Any) -> Path:
    config, model, own = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model(config(**{**SIZES, **own, **changes})).save_pretrained(folder)
    return folder


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_are_those_of_files_and_lead_back_into_the_model(tmp_path: Path, family: str) -> None:
    folder = moe(tmp_path, family)
    saved = load_file(folder / "model.safetensors")
    model = load_causal_lm(folder, "fp32", "eager")
    assert same(dict(to_checkpoint(model, model.state_dict().items())), saved)
    form = CheckpointForm(model)
    back = [
        pair for bucket in buckets(to_checkpoint(model, model.state_dict().items()), 1) for pair in form.own(bucket)
    ]
    assert len(back) == len(model.state_dict())
    assert same(dict(back), dict(model.state_dict()))


def test_a_folder_that_holds_experts_fused_leaves_as_one_that_does_not(tmp_path: Path) -> None:
    folder = moe(tmp_path)
    saved = load_file(folder / "model.safetensors")
    state = load_causal_lm(folder, "fp32", "eager").state_dict()
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    fused = load_causal_lm(folder, "fp32", "eager")
    assert same(dict(to_checkpoint(fused, fused.state_dict().items())), saved)


def test_a_backbone_alone_has_them_too(tmp_path: Path) -> None:
    folder = moe(tmp_path)
    saved = load_file(folder / "model.safetensors")
    del saved["lm_head.weight"]
    model = AutoModel.from_pretrained(folder)
    assert same(
        dict(to_checkpoint(model, model.state_dict().items())),
        {name.removeprefix("model."): t for name, t in saved.items()},
    )


def test_no_more_than_a_layer_is_held_and_a_dense_model_passes_as_it_is(tmp_path: Path) -> None:
    model, seen = load_causal_lm(moe(tmp_path / "moe"), "fp32", "eager"), []

    def named() -> Any:
        for name, tensor in model.state_dict().items():
            seen.append(name)
            yield name, tensor

    for name, _ in to_checkpoint(model, named()):
        if ".layers.0." in name:
            assert not any(".layers.2." in other for other in seen)
    dense = load_causal_lm(tiny_model(tmp_path / "dense"), "fp32", "eager")
    state = dense.state_dict(keep_vars=True)
    assert all(state[name] is tensor for name, tensor in to_checkpoint(dense, state.items()))


def test_an_export_after_an_update_loads_in_transformers_with_equal_weights(
    tmp_path: Path, build: Build, update: Update
) -> None:
    model = moe(tmp_path / "model")
    strategy = build(model=model)
    strategy.update(update)
    strategy.export(tmp_path / "export")
    saved = load_file(tmp_path / "export" / "model.safetensors")
    assert "model.layers.2.mlp.experts.11.up_proj.weight" in saved
    assert not same(saved, load_file(model / "model.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert same(dict(loaded.state_dict()), dict(strategy.model.state_dict()))
    assert strategy.logprobs(update.rows).tolist() == build(model=tmp_path / "export").logprobs(update.rows).tolist()


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_adapters_are_added_beside_experts_and_on_fused_ones_refused(
    tmp_path: Path, build: Build, update: Update
) -> None:
    pytest.importorskip("peft", reason="LoRA needs PEFT: pip install 'turnwise-torch[lora]'")
    model = moe(tmp_path)
    strategy = build(model=model, lora=Lora(rank=4, alpha=8, target=("q_proj", "o_proj")))
    for _ in range(2):
        strategy.update(update)
    saved, sent = load_file(model / "model.safetensors"), dict(strategy.weights())
    assert sent.keys() == saved.keys()
    moved = {name for name in saved if not torch.equal(saved[name], sent[name])}
    assert moved == {f"model.layers.{n}.self_attn.{part}_proj.weight" for n in range(3) for part in "qo"}
    for target in ("all-linear", "experts", ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj",)):
        with pytest.raises(ConfigError, match=r"actor_train\.model_args\.lora_target") as caught:
            build(model=model, lora=Lora(rank=4, alpha=8, target=target))
        assert "\n" not in str(caught.value)
