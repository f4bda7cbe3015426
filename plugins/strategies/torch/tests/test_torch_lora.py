"""What is trained: adapters alone, or all but a frozen part; and how merged weights, exports and states look then."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from turnwise.contracts.train import Lora, Offer
from turnwise.data.rows import Rows, Update
from turnwise.errors import CheckpointError, ConfigError, TrainerError
from turnwise_torch.broadcast import Member
from turnwise_torch.fixtures import tiny_model
from turnwise_torch.models import load_causal_lm
from turnwise_torch.state import STATE_FILE
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.stream import receive
from turnwise_torch.testing import weights_of

Build = Callable[..., TorchStrategy]
LORA = Lora(rank=4, alpha=8)
REASON = "LoRA needs PEFT: pip install 'turnwise-torch[lora]'"


def trained(strategy: TorchStrategy) -> set[str]:
    return {name for name, p in strategy.model.named_parameters() if p.requires_grad}


def plain_logprobs(model: Any, rows: Rows, temperature: float = 1.0) -> np.ndarray:
    """By a whole forward pass of each sample."""
    out = []
    for start, end in zip(rows.offsets[:-1], rows.offsets[1:]):
        ids = torch.from_numpy(rows.input_ids[start:end].astype(np.int64))
        with torch.no_grad():
            every = torch.log_softmax(model(input_ids=ids[None]).logits[0].double() / temperature, -1)
        out += [float(every[t - 1, ids[t]]) for t in range(len(ids)) if rows.response_mask[start + t]]
    return np.array(out)


# ---------------------------------------------------------------- adapters


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason=REASON)


def test_adapters_start_as_the_base_and_train_alone(peft: Any, build: Build, update: Update) -> None:
    base, strategy = build(), build(lora=LORA)
    np.testing.assert_array_equal(strategy.logprobs(update.rows), base.logprobs(update.rows))
    names = trained(strategy)
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in names} == {
        "q_proj",
        "v_proj",
    }, "PEFT's choice for Qwen2"
    before = {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
    for _ in range(2):  # the first step moves B alone: A's gradient is zero while B is
        strategy.update(update)
    assert {name for name, p in strategy.model.named_parameters() if not torch.equal(p, before[name])} == names


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_are_merged_under_the_names_of_the_base_and_the_trained_ones_stay(
    peft: Any, build: Build, folder: Path, update: Update, dtype: str
) -> None:
    strategy = build(lora=evolve(LORA, target="all-linear"), dtype=dtype)
    for _ in range(3):
        strategy.update(update)
    held = {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
    sent = weights_of(strategy)
    assert all(torch.equal(p, held[name]) for name, p in strategy.model.named_parameters())
    plain = load_causal_lm(folder, dtype, "sdpa")
    assert list(sent) == list(plain.state_dict())
    assert {str(tensor.dtype) for tensor in sent.values()} == {"torch.float32" if dtype == "fp32" else "torch.bfloat16"}
    plain.load_state_dict(sent)
    off = 1e-5 if dtype == "fp32" else 0.1
    np.testing.assert_allclose(plain_logprobs(plain, update.rows), strategy.logprobs(update.rows), rtol=0, atol=off)
    assert np.abs(strategy.logprobs(update.rows) - build(dtype=dtype).logprobs(update.rows)).max() > 10 * off / (
        1 if dtype == "fp32" else 30
    )


def test_an_export_holds_the_merged_model_and_the_adapters_beside_it(
    peft: Any, build: Build, folder: Path, update: Update, tmp_path: Path
) -> None:
    strategy = build(lora=evolve(LORA, target=("q_proj", "down_proj")))
    for _ in range(2):
        strategy.update(update)
    strategy.export(tmp_path / "out")
    expected = strategy.logprobs(update.rows)
    np.testing.assert_allclose(build(model=tmp_path / "out").logprobs(update.rows), expected, rtol=0, atol=1e-5)
    adapted = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tmp_path / "out" / "adapter"
    )
    np.testing.assert_allclose(plain_logprobs(adapted, update.rows), expected, rtol=0, atol=1e-5)


def test_a_state_holds_the_adapters_alone_and_continues_to_the_last_bit(
    peft: Any, build: Build, update: Update, tmp_path: Path
) -> None:
    one = build(lora=LORA, dtype="bf16")
    one.update(update)
    one.save(tmp_path)
    with safe_open(tmp_path / STATE_FILE, "pt") as state:
        names = {name.partition("/")[2] for name in state.keys() if name.startswith("master/")}  # noqa: SIM118 (a handle, not a mapping)
    assert names == trained(one)
    two = build(lora=LORA, dtype="bf16")
    two.load(tmp_path)
    assert one.update(update).loss == two.update(update).loss
    assert np.array_equal(one.logprobs(update.rows), two.logprobs(update.rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": None}, r"saved with lora 'rank 4, alpha 8, target None', this run has 'none'"),
        ({"lora": evolve(LORA, rank=8)}, r"this run has 'rank 8, alpha 8, target None'"),
    ],
)
def test_a_state_of_other_adapters_is_reported(
    peft: Any, build: Build, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    build(lora=LORA).save(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        build(**changes).load(tmp_path)


def test_the_reference_is_the_actor_with_its_adapters_off(peft: Any, build: Build, update: Update) -> None:
    actor, reference = build(lora=LORA), build(lora=LORA, trainable=False, objective=None, role="reference")
    for _ in range(2):
        actor.update(update)
    assert not np.array_equal(actor.logprobs(update.rows), reference.logprobs(update.rows))
    after = actor.logprobs(update.rows)
    np.testing.assert_array_equal(actor.base_logprobs(update.rows), reference.logprobs(update.rows))
    np.testing.assert_array_equal(actor.logprobs(update.rows), after)
    assert actor.update(update).grad_norm > 0


def test_a_critic_trains_adapters_and_its_head(peft: Any, build: Build, update: Update, tmp_path: Path) -> None:
    critic = build(lora=LORA, head="value")
    count = len(update.rows.columns["coef"])
    rows = evolve(
        update.rows, columns={**update.rows.columns, "coef": np.full(count, 1 / count), "returns": np.ones(count)}
    )
    for _ in range(3):
        critic.update(Update(rows, lr=1e-2))
    assert {name for name in trained(critic) if ".lora_" not in name} == {"value_head.weight", "value_head.bias"}
    critic.export(tmp_path)
    np.testing.assert_allclose(build(model=tmp_path, head="value").values(rows), critic.values(rows), rtol=0, atol=1e-5)


def test_gradients_of_adapters_are_those_of_plain_autograd_through_the_merged_weight(
    peft: Any, build: Build, update: Update
) -> None:
    """d/dB of f(W + s·B·A) is s·(df/dW)·Aᵀ; at the start B = 0, so that df/dW is that of the base."""
    base, strategy = build(max_grad_norm=0.0), build(lora=LORA, max_grad_norm=0.0)
    for one in (base, strategy):
        one.optimizer.step = lambda lr: None  # type: ignore
        # An update clears the gradients, and shows them nowhere.
        one._clear = lambda: None  # type: ignore[method-assign]
        one.update(update)
    of_base = {name: p.grad for name, p in base.model.named_parameters()}
    held = dict(strategy.model.named_parameters())
    for name in trained(strategy):
        if ".lora_B." in name:
            a = held[name.replace("lora_B", "lora_A")]
            whole = of_base[name.replace("lora_B.default.", "")]
            assert whole is not None
            torch.testing.assert_close(held[name].grad, 2.0 * whole @ a.T, rtol=1e-4, atol=1e-7)


# ---------------------------------------------------------------- adapters alone for the backend

ALONE = evolve(LORA, target=("q_proj", "down_proj"), sync="adapter")


def read(strategy: TorchStrategy, transport: str) -> tuple[Offer, dict[str, torch.Tensor]]:
    """An offer, and the tensors that a backend gets by it."""
    offer = strategy.offer(transport, 3)
    if transport == "safetensors":
        strategy.send(offer)
        return offer, load_file(Path(offer.payload["folder"]) / "adapter_model.safetensors")
    stream = receive if transport == "shared_memory" else Member(torch.device("cpu")).receive
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(strategy.send, offer)
        got = {name: tensor.clone() for bucket in stream(offer.payload, 20) for name, tensor in bucket}
        sending.result()
    return offer, got


@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "safetensors"])
def test_adapters_alone_are_offered_as_peft_writes_them(
    peft: Any, build: Build, folder: Path, update: Update, tmp_path: Path, transport: str
) -> None:
    strategy = build(lora=ALONE, bucket_bytes=1000)
    for _ in range(2):
        strategy.update(update)
    held = {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
    offer, got = read(strategy, transport)
    whole = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    expected = peft.get_peft_model_state_dict(whole)
    assert {name: tensor.shape for name, tensor in got.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    for name, tensor in got.items():
        assert torch.equal(tensor, held[name.removeprefix("base_model.model.").replace(".weight", ".default.weight")])
    whole.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert offer.adapter is not None
    described = {**offer.adapter, "target_modules": sorted(offer.adapter["target_modules"])}
    assert described == {
        **written,
        "inference_mode": True,
        "target_modules": ["down_proj", "q_proj"],
        "auto_mapping": None,
        "base_model_name_or_path": str(folder),
    }
    assert type(offer.adapter["peft_type"]) is str, "who reads the offer need not have PEFT"
    assert all(torch.equal(p, held[name]) for name, p in strategy.model.named_parameters())


def test_peft_loads_a_folder_of_adapters_alone_with_the_trainers_log_probs(
    peft: Any, build: Build, folder: Path, update: Update
) -> None:
    strategy = build(lora=ALONE)
    for _ in range(2):
        strategy.update(update)
    place = Path(strategy.offer("safetensors", 1).payload["folder"])
    assert {file.name for file in place.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), place)
    np.testing.assert_allclose(plain_logprobs(adapted, update.rows), strategy.logprobs(update.rows), rtol=0, atol=1e-5)
    strategy.offer("safetensors", 2)
    assert not place.exists()


def test_adapters_that_cannot_be_written_are_reported_in_one_line(
    peft: Any, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError("no space left on device")

    strategy = build(lora=ALONE)
    monkeypatch.setattr("turnwise_torch.lora.save_file", full)
    with pytest.raises(
        TrainerError, match=r"^weight update: cannot write the adapters to /\S+: no space left on device$"
    ):
        strategy.offer("safetensors", 1)
    strategy.close()


def test_states_exports_and_the_shared_module_are_the_same_whatever_the_backend_gets(
    peft: Any, build: Build, update: Update, tmp_path: Path
) -> None:
    alone, whole = build(lora=ALONE), build(lora=evolve(ALONE, sync="merged"))
    for one in (alone, whole):
        one.update(update)
    alone.save(tmp_path)
    whole.load(tmp_path)
    for one, name in ((alone, "alone"), (whole, "whole")):
        one.export(tmp_path / name)
    exports = [load_file(tmp_path / name / "model.safetensors") for name in ("alone", "whole")]
    assert exports[0].keys() == exports[1].keys()
    assert all(torch.equal(tensor, exports[1][name]) for name, tensor in exports[0].items())
    assert (tmp_path / "alone" / "adapter" / "adapter_config.json").read_bytes() == (
        tmp_path / "whole" / "adapter" / "adapter_config.json"
    ).read_bytes()
    assert [one.offer("shared", 1).adapter for one in (alone, whole)] == [None, None]
    assert whole.offer("safetensors", 1).adapter is None
    reference = build(lora=ALONE, trainable=False, objective=None, role="reference")
    assert reference.offer("safetensors", 1).adapter is None


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "no_such",
            (
                r"actor_train.model_args.lora_target: Target modules .*no_such.* Linear layers of Qwen2ForCausalLM:"
                r" .*q_proj"
            ),
        ),
        (("q_proj", "lm_head"), "lm_head is a Linear, adapters are for the linear layers of the backbone"),
        (("embed_tokens",), "embed_tokens is a Embedding, adapters are for the linear layers of the backbone"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_targets_that_cannot_have_adapters_are_refused(peft: Any, build: Build, target: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(lora=evolve(LORA, target=target))
    assert "\n" not in str(caught.value)


def test_targets_are_names_with_commas_or_a_pattern(peft: Any, build: Build) -> None:
    def targets(target: str) -> set[str]:
        return {
            name.rpartition(".lora_")[0].removeprefix("model.layers.")
            for name in trained(build(lora=evolve(LORA, target=target)))
        }

    assert targets("q_proj, up_proj") == {
        f"{i}.{name}" for i in range(2) for name in ("self_attn.q_proj", "mlp.up_proj")
    }
    assert targets(r".*\.1\.mlp\.(up|gate)_proj") == {"1.mlp.up_proj", "1.mlp.gate_proj"}


def test_without_peft_the_machine_is_reported(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("turnwise_torch.lora.importlib.util.find_spec", lambda name: None)
    context = evolve(build().context, lora=LORA)
    (lack,) = TorchStrategy.check(build().config, context)
    assert (
        lack.machine
        and lack.path == "actor_train.model_args.lora_rank"
        and "needs the package peft. Fix: pip install" in lack.text
    )
    assert TorchStrategy.check(build().config, evolve(context, trainable=False)) == []


# ---------------------------------------------------------------- frozen parts


@pytest.mark.parametrize("prefix", ["model.layers.0.", "layers.0."])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_frozen_prefix_is_not_trained_and_not_saved(
    build: Build, update: Update, tmp_path: Path, prefix: str, dtype: str
) -> None:
    strategy = build(frozen=(prefix,), dtype=dtype, gradient_checkpointing=True)
    before = {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
    for _ in range(2):
        strategy.update(evolve(update, lr=1e-2))
    still = {name for name, p in strategy.model.named_parameters() if torch.equal(p, before[name])}
    assert still == {name for name in before if name.startswith("model.layers.0.")}
    strategy.save(tmp_path)
    other = build(frozen=(prefix,), dtype=dtype)
    other.load(tmp_path)
    assert np.array_equal(other.logprobs(update.rows), strategy.logprobs(update.rows))


def test_frozen_names_are_those_of_the_checkpoint_for_a_critic_too(build: Build) -> None:
    for prefix in ("model.layers.", "layers.", "backbone.layers."):
        critic = build(head="value", frozen=(prefix, "embed_tokens"))
        assert trained(critic) == {"backbone.norm.weight", "value_head.weight", "value_head.bias"}


def test_frozen_adapters_do_not_train_either(peft: Any, build: Build) -> None:
    assert {name.split(".")[2] for name in trained(build(lora=LORA, frozen=("model.layers.0",)))} == {"1"}


def test_a_prefix_of_nothing_is_reported_with_what_there_is(build: Build) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no parameter begins with 'layer\.'\. Did you mean 'layers'\? There are: embed_tokens, layers, norm",
    ):
        build(frozen=("layer.",))


def test_freezing_everything_is_refused(build: Build, tmp_path: Path) -> None:
    untied = tiny_model(tmp_path, tied=False)
    assert trained(build(model=untied, frozen=("model",))) == {"lm_head.weight"}
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        build(model=untied, frozen=("model.", "lm_head"))
