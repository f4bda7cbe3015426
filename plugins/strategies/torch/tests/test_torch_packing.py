"""Several samples in one row: the same log-probs, values and gradients as alone, and models that cannot do it are
refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from turnwise.contracts.train import TrainContext
from turnwise.data.rows import Rows, Update
from turnwise.errors import ConfigError, TrainerError
from turnwise_torch import models
from turnwise_torch.config import TorchConfig
from turnwise_torch.microbatch import Layout
from turnwise_torch.packing import Packing, packed_mask
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.testing import gradient_of, packed

Build = Callable[..., TorchStrategy]
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
BUDGETS = (
    1,
    25,
    60,
    1000,
)  # every sample is 5 to 20 tokens, 97 in all: one a row, two or more, several rows, all at once


def saved(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    with models.quiet():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def alone(model: torch.nn.Module, rows: Rows) -> list[float]:
    """Log-probs of every response token, one sample at a time, by a plain forward pass in float64."""
    out = []
    for start, end in zip(rows.offsets[:-1], rows.offsets[1:]):
        ids = torch.from_numpy(rows.input_ids[start:end].astype(np.int64))
        with torch.no_grad():
            every = torch.log_softmax(model(ids[None], use_cache=False).logits[0] / 0.7, -1)
        out += [float(every[t - 1, ids[t]]) for t in range(len(ids)) if rows.response_mask[start + t]]
    return out


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_log_probs_are_those_of_single_samples(
    build: Build, folder: Path, rows: Rows, budget: int, attention: str
) -> None:
    got = build(temperature=0.7, attn_implementation=attention, **packed(budget)).logprobs(rows)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    np.testing.assert_allclose(got, alone(model, rows), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_other_models_are_packed_too(build: Build, rows: Rows, tmp_path: Path, kind: type[PreTrainedConfig]) -> None:
    folder = saved(kind(**SIZES), tmp_path)
    got = build(model=folder, temperature=0.7, **packed(60)).logprobs(rows)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    np.testing.assert_allclose(got, alone(model, rows), rtol=0, atol=1e-5)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_packed_gradient_is_that_of_single_samples(
    build: Build, update: Update, budget: int, checkpointing: bool
) -> None:
    single = gradient_of(build(per_device_train_batch_size=1, max_grad_norm=0.0), update)
    other = gradient_of(build(max_grad_norm=0.0, gradient_checkpointing=checkpointing, **packed(budget)), update)
    assert float((other - single).norm() / single.norm()) <= 1e-6


def test_a_packed_update_reports_what_an_unpacked_one_does(build: Build, update: Update) -> None:
    one, two = build(per_device_train_batch_size=1).update(update), build(**packed(60)).update(update)
    assert two.loss == pytest.approx(one.loss, rel=1e-5)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert two.sums.keys() == one.sums.keys()
    for name, (x, w) in one.sums.items():
        assert two.sums[name] == pytest.approx((x, w), rel=1e-5, abs=1e-6)


def test_packed_values_and_their_gradient_are_those_of_single_samples(
    build: Build, folder: Path, update: Update, tmp_path: Path
) -> None:
    with models.quiet():
        models.load_value_model(folder, "fp32", "sdpa").backbone.save_pretrained(tmp_path)  # type: ignore[operator]
    save_file({"weight": torch.linspace(-1, 1, 32)[None], "bias": torch.ones(1)}, tmp_path / models.VALUE_HEAD_FILE)
    critic = {"model": tmp_path, "role": "critic", "head": "value", "max_grad_norm": 0.0}
    returns = np.random.default_rng(2).normal(size=len(update.rows.columns["coef"])).astype(np.float32)
    rows = evolve(update.rows, columns={**update.rows.columns, "returns": returns, "values": returns})
    single, together = build(per_device_train_batch_size=1, infer_batch_size=1, **critic), build(**critic, **packed(60))
    values = single.values(rows)
    assert values.std() > 0.1
    np.testing.assert_allclose(together.values(rows), values, rtol=0, atol=1e-5)
    expected = gradient_of(single, evolve(update, rows=rows))
    assert float((gradient_of(together, evolve(update, rows=rows)) - expected).norm() / expected.norm()) <= 1e-6


def test_a_packed_batch_by_hand() -> None:
    """Samples of 3, 2 and 4 tokens whose last is sampled: 2, 1 and 3 are computed, the first and second in one row."""
    mask = np.array([0, 0, 1, 0, 1, 0, 1, 0, 1], bool)
    layout = Layout(Rows(np.arange(10, 19, dtype=np.int32), np.array([0, 3, 5, 9]), mask))
    batch = layout.packed_batch([np.array([2]), np.array([0, 1])], torch.device("cpu"))
    assert batch.input_ids.tolist() == [[15, 16, 17], [10, 11, 13]]
    assert batch.predictors.tolist() == [0, 2, 4, 5]
    assert batch.targets.tolist() == [16, 18, 12, 14]
    assert batch.responses.tolist() == [2, 3, 0, 1]
    assert batch.packing is not None
    assert batch.packing.position_ids.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch.packing.segments.tolist() == [[0, 0, 0], [0, 0, 1]]


def test_padding_behind_packed_samples_is_a_segment_of_its_own() -> None:
    mask = np.array([0, 1, 0, 1, 0, 0, 0, 0, 1], bool)
    layout = Layout(Rows(np.arange(9, dtype=np.int32), np.array([0, 2, 4, 9]), mask))
    batch = layout.packed_batch([np.array([2]), np.array([0, 1])], torch.device("cpu"))
    assert batch.input_ids.tolist() == [[4, 5, 6, 7], [0, 2, 0, 0]]
    assert batch.packing is not None
    assert batch.packing.segments.tolist() == [[0, 0, 0, 0], [0, 1, 2, 2]]
    assert batch.packing.position_ids.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]


def test_samples_alone_in_their_rows_need_no_mask() -> None:
    layout = Layout(Rows(np.arange(4, dtype=np.int32), np.array([0, 2, 4]), np.array([0, 1, 0, 1], bool)))
    assert layout.packed_batch([np.array([1]), np.array([0])], torch.device("cpu")).packing is None


def test_the_mask_is_causal_within_a_sample() -> None:
    packing = Packing(torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 0, 1, 1]]))
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    assert torch.equal(packed_mask(packing, "sdpa", torch.float32), expected[None, None])
    added = packed_mask(packing, "eager", torch.bfloat16)
    assert added.dtype == torch.bfloat16
    assert torch.equal(added[0, 0] == 0, expected)
    assert (added[0, 0][~expected] == torch.finfo(torch.bfloat16).min).all()


def test_flash_attention_gets_one_row_whose_positions_begin_again_and_no_mask(
    build: Build, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package at hand: what the model is called with."""
    strategy = build(**packed(60))
    strategy.feed.context = evolve(strategy.context, attn_implementation="flash_attention_2")
    backbone = models.backbone_of(strategy.model)
    monkeypatch.setattr(models, "attention_of", lambda model: "flash_attention_2")
    seen = []

    def look(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor | None]) -> None:
        seen.append(kwargs)

    backbone.register_forward_pre_hook(look, with_kwargs=True)
    got = strategy.logprobs(rows)
    assert len(seen) == 2
    for call in seen:
        assert call["attention_mask"] is None
        assert call["input_ids"] is not None
        assert call["position_ids"] is not None
        assert call["input_ids"].shape[0] == 1
        assert call["input_ids"].numel() <= 60
        assert int((call["position_ids"] == 0).sum()) > 1
    # Without a mask transformers' sdpa also tells packed samples apart by positions that begin again.
    np.testing.assert_allclose(got, build().logprobs(rows), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MistralConfig(**SIZES, sliding_window=4), "MistralForCausalLM has layers of sliding_attention"),
        (
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1),
            "Qwen2ForCausalLM has layers of sliding_attention",
        ),
        (
            MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, state_size=4),
            "MambaForCausalLM has layers of linear_attention",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_attention_that_cannot_be_packed_is_refused(config: PreTrainedConfig, expected: str, tmp_path: Path) -> None:
    context = TrainContext(
        saved(config, tmp_path), "actor_train", trainable=False, dtype="fp32", attn_implementation="eager", **packed(60)
    )  # type: ignore[arg-type]
    with pytest.raises(TrainerError, match=rf"{expected}.* Fix: use_sequence_packing: false for this role") as caught:
        TorchStrategy(TorchConfig(), context)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_whose_packed_samples_see_each_other_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    model = models.load_causal_lm(folder, dtype, "sdpa")
    models.check_packing(model)
    monkeypatch.setattr(models, "packed_mask", lambda packing, *_: torch.ones(1, 1, 12, 12, dtype=torch.bool).tril())
    with pytest.raises(TrainerError, match="Qwen2ForCausalLM does not keep packed samples apart"):
        models.check_packing(model)


def test_learned_positions_are_packed_too(rows: Rows, tmp_path: Path) -> None:
    folder = saved(
        GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None), tmp_path
    )
    context = TrainContext(folder, "reference", trainable=False, dtype="fp32", temperature=0.7, **packed(60))  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    np.testing.assert_allclose(TorchStrategy(None, context).logprobs(rows), alone(model, rows), rtol=0, atol=1e-5)


def test_packing_without_budgets_or_with_flex_attention_is_refused(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"actor_train\.use_sequence_packing: needs both token budgets"):
        build(use_sequence_packing=True)
    with pytest.raises(
        ConfigError,
        match=r"flex_attention is not packed by strategy torch\. Fix: model_args\.attn_implementation: sdpa",
    ):
        build(attn_implementation="flex_attention", **packed(60))
