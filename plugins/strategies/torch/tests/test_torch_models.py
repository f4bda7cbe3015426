"""Loading models, the value head, gradient checkpointing, models shared in a process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from turnwise.errors import CheckpointError, EngineError, TrainerError
from turnwise_torch import models, shared
from turnwise_torch.fixtures import tiny_model
from turnwise_torch.microbatch import plain

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32), ("fp64", torch.float64)],
)
def test_a_model_is_loaded_in_the_named_dtype(folder: Path, name: str, dtype: torch.dtype) -> None:
    model = models.load_causal_lm(folder, name, "sdpa")
    assert {p.dtype for p in model.parameters()} == {dtype} == {models.torch_dtype(name)}
    assert not model.training


def test_an_unknown_dtype_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown dtype 'bf61'. Did you mean 'bf16'\? Known: bf16, fp16, fp32, fp64"):
        models.torch_dtype("bf61")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a model folder"):
        models.load_causal_lm(tmp_path, "fp32", "sdpa")


def test_a_cut_weight_file_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cannot load the model in") as caught:
        models.load_causal_lm(copy, "fp32", "sdpa")
    assert "\n" not in str(caught.value)


def test_missing_weights_are_refused_instead_of_drawn_at_random(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    weights = load_file(copy / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights, the first is 'model.norm.weight'"):
        models.load_causal_lm(copy, "fp32", "sdpa")


def changed(folder: Path, copy: Path, weights: dict[str, torch.Tensor]) -> Path:
    """A copy of a folder whose weights are others, or more."""
    shutil.copytree(folder, copy)
    save_file({**load_file(copy / "model.safetensors"), **weights}, copy / "model.safetensors", {"format": "pt"})
    return copy


@pytest.mark.parametrize("load", [models.load_causal_lm, models.load_value_model])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_norm.weight", "model.norm.bias"])
def test_weights_of_another_architecture_are_refused_instead_of_left_out(
    folder: Path, tmp_path: Path, load: Callable[..., torch.nn.Module], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match=f"1 weights in .* fit no parameter of Qwen2.*{name}.*Fix: "):
        load(changed(folder, tmp_path / "copy", {name: torch.ones(8)}), "fp32", "sdpa")
    assert "REPORT" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("load", [models.load_causal_lm, models.load_value_model])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(
    folder: Path, tmp_path: Path, load: Callable[..., torch.nn.Module], dtype: str, value: float
) -> None:
    weight = load_file(folder / "model.safetensors")["model.norm.weight"]
    weight[-1] = value
    with pytest.raises(CheckpointError, match=r"not finite, the first in '(model\.)?norm\.weight'. Fix: "):
        load(changed(folder, tmp_path / "copy", {"model.norm.weight": weight}), dtype, "sdpa")


def test_another_head_stays_out_and_is_named_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = changed(folder, tmp_path / "copy", {"score.weight": torch.ones(1, 32), "visual.merger": torch.ones(2)})
    ours, theirs = (models.load_causal_lm(place, "fp32", "sdpa").state_dict() for place in (copy, folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    models.load_causal_lm(copy, "fp32", "sdpa")
    line = f"{copy}: 2 weights are no part of Qwen2ForCausalLM and stay out, the first is 'score.weight'"
    assert caplog.messages == [line]


def test_a_critic_says_nothing_of_the_head_that_it_does_not_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models.load_value_model(tiny_model(tmp_path, tied=False), "fp32", "sdpa")
    assert caplog.messages == []


def test_a_bias_of_a_head_without_one_is_of_another_architecture(folder: Path, tmp_path: Path) -> None:
    copy = changed(folder, tmp_path / "copy", {"lm_head.bias": torch.ones(50)})
    with pytest.raises(CheckpointError, match=r"1 weights in .* fit no parameter of Qwen2ForCausalLM.*'lm_head.bias'"):
        models.load_causal_lm(copy, "fp32", "sdpa")


def test_the_value_head_starts_at_zero_and_is_read_from_an_exported_critic(folder: Path, tmp_path: Path) -> None:
    model = models.load_value_model(folder, "fp32", "sdpa")
    assert not model.value_head.weight.any()
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    save_file({"weight": torch.full((1, 32), 0.5), "bias": torch.ones(1)}, copy / models.VALUE_HEAD_FILE)
    again = models.load_value_model(copy, "bf16", "sdpa")
    assert (again.value_head.weight == 0.5).all()
    assert again.value_head.weight.dtype == torch.bfloat16


def test_the_hidden_states_under_the_head_are_the_models_logits(folder: Path) -> None:
    model = models.load_causal_lm(folder, "fp32", "sdpa")
    models.check_head(model)
    torch.testing.assert_close(model.lm_head(models.hidden_states(model, plain(IDS))), model(IDS).logits)


def test_a_model_that_changes_its_logits_after_the_head_is_refused(folder: Path) -> None:
    model = models.load_causal_lm(folder, "fp32", "sdpa")
    model.register_forward_hook(lambda module, args, output: output.__class__(logits=output.logits / 2))
    with pytest.raises(TrainerError, match="changes its logits after the LM head"):
        models.check_head(model)
    capped = models.load_causal_lm(folder, "fp32", "sdpa")
    capped.config.final_logit_softcapping = 30.0
    with pytest.raises(TrainerError, match="changes its logits after the LM head"):
        models.check_head(capped)


def test_gradient_checkpointing_changes_no_gradient_and_leaves_the_cache_to_a_sampler(folder: Path) -> None:
    plain, wrapped = (models.load_causal_lm(folder, "fp32", "sdpa") for _ in range(2))
    models.enable_gradient_checkpointing(wrapped)
    for model in (plain, wrapped):
        model(IDS, use_cache=False).logits.square().sum().backward()
    for (name, p), (_, q) in zip(plain.named_parameters(), wrapped.named_parameters()):
        assert torch.equal(p.grad, q.grad), name
    with torch.no_grad():
        step = wrapped(IDS[:, :5], use_cache=True)
        rest = wrapped(IDS[:, 5:], past_key_values=step.past_key_values, use_cache=True)
    torch.testing.assert_close(rest.logits, plain(IDS).logits[:, 5:])


def test_checkpointing_really_recomputes_the_layers(folder: Path) -> None:
    model = models.load_causal_lm(folder, "fp32", "sdpa")
    models.enable_gradient_checkpointing(model)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model(IDS, use_cache=False).logits.sum().backward()
    assert len(calls) == 2


def test_a_model_without_layers_to_checkpoint_is_reported() -> None:
    with pytest.raises(TrainerError, match="disable_gradient_checkpointing: true"):
        models.enable_gradient_checkpointing(torch.nn.Linear(2, 2))


def test_a_published_model_is_found_by_its_key_until_it_is_withdrawn() -> None:
    model = torch.nn.Linear(1, 1)
    key = shared.publish(model)
    assert shared.lookup(key).model is model
    assert shared.lookup(key).lock is shared.lookup(key).lock
    shared.withdraw(key)
    shared.withdraw(key)
    with pytest.raises(EngineError, match=f"no shared model '{key}' in this process"):
        shared.lookup(key)


def test_the_tiny_model_depends_on_its_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    one = load_file(tiny_model(tmp_path / "a", seed=3) / "model.safetensors")
    two = load_file(tiny_model(tmp_path / "b", seed=3) / "model.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["vocab_size"] == 50
