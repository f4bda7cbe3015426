"""One process of the real Megatron: parity with strategy torch, checkpoints, the shim."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from turnwise.contracts.train import LossChoice, Objective
from turnwise.data.rows import Rows, Update
from turnwise.errors import OutOfMemory, TrainerError
from turnwise.plugins import registry
from turnwise_megatron.config import MegatronConfig
from turnwise_megatron.strategy import MegatronStrategy
from turnwise_torch.config import TorchConfig
from turnwise_torch.models import load_causal_lm
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.testing import weights_of

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings(r"ignore::Warning:megatron\.core"),
    pytest.mark.filterwarnings(r"ignore:`torch\.distributed\.\w+` is deprecated:FutureWarning"),
]


def test_the_conformance_kit_passes(tmp_path: Path) -> None:
    code = (
        "import sys; from turnwise.testing.kit import run_conformance; sys.exit(run_conformance('megatron',"
        " 'train_strategy', strict=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]


def assert_trains_like(plain: dict[str, Any], strategy: MegatronStrategy, updates: list[Update]) -> None:
    results = [strategy.update(update) for update in updates]
    np.testing.assert_allclose([result.loss for result in results], plain["losses"], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose([result.grad_norm for result in results], plain["norms"], rtol=1e-5)
    after = weights_of(strategy)
    for name, expected in plain["after"].items():
        np.testing.assert_allclose(after[name], expected, atol=1e-4, rtol=0, err_msg=name)


@pytest.mark.parametrize("distributed", [True, False])
def test_five_updates_of_one_process_are_those_of_plain_torch(
    lab: Any, qwen2: Path, build: Any, distributed: bool
) -> None:
    updates = lab.five_updates()
    plain = lab.plain_training(qwen2, updates)
    strategy = build(MegatronConfig(betas=(0.9, 0.95), eps=1e-6, use_distributed_optimizer=distributed, logits_chunk=3))
    assert_trains_like(plain, strategy, updates)


@pytest.mark.parametrize("ratio_type", ["token", "segment"])
def test_every_loss_has_the_objective_that_strategy_torch_has(
    lab: Any, qwen2: Path, build: Any, ratio_type: str
) -> None:
    update = lab.five_updates()[0]
    names = [entry.name for entry in registry().entries("policy_loss") if entry.distribution == "turnwise-losses"]
    assert len(names) > 8
    for name in names:
        objective = Objective(LossChoice(name), ratio_type=ratio_type)  # type: ignore[arg-type]
        expected = TorchStrategy(TorchConfig(), lab.context_of(qwen2, objective=objective)).update(
            evolve(update, kl_coef=0.1)
        )
        got = build(objective=objective).update(evolve(update, kl_coef=0.1))
        np.testing.assert_allclose(
            [got.loss, got.grad_norm], [expected.loss, expected.grad_norm], rtol=1e-4, atol=1e-6, err_msg=name
        )
        assert got.sums.keys() == expected.sums.keys()
        for key, pair in expected.sums.items():
            np.testing.assert_allclose(got.sums[key], pair, rtol=1e-4, atol=1e-5, err_msg=f"{name} {key}")


def coefficients(mode: str, rows: Rows) -> np.ndarray:
    """Coefficients of the aggregation modes (ALGORITHMS: the denominators of token-mean, seq-mean-token-mean, -sum and
    -sum-norm)."""
    owner, weight = rows.columns["sample"], rows.columns["weight"]
    tokens = np.bincount(owner)[owner]
    samples = len(np.unique(owner))
    return {
        "token-mean": weight / weight.sum(),
        "seq-mean-token-mean": weight / tokens / samples,
        "seq-mean-token-sum": weight / samples,
        "seq-mean-token-sum-norm": weight / samples / 20,
    }[mode]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_every_aggregation_is_in_the_coefficients_alone(lab: Any, qwen2: Path, build: Any, mode: str) -> None:
    update = lab.five_updates()[0]
    rows = evolve(update.rows, columns={**update.rows.columns, "coef": coefficients(mode, update.rows)})
    expected = TorchStrategy(TorchConfig(), lab.context_of(qwen2)).update(evolve(update, rows=rows))
    got = build(max_tokens_per_microbatch_in_train=40).update(evolve(update, rows=rows))
    np.testing.assert_allclose([got.loss, got.grad_norm], [expected.loss, expected.grad_norm], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen2", False), ("qwen3", True), ("llama", False), ("qwen3_moe", False)]
)
def test_log_probs_are_those_of_transformers_and_weights_come_back_bit_by_bit(
    lab: Any, tmp_path: Path, build: Any, family: str, tied: bool
) -> None:
    folder, rows = lab.make_model(tmp_path / "model", family, tied), lab.make_rows(3, 7)
    strategy = build(model=folder, trainable=False, role="reference", objective=None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(strategy.logprobs(rows), lab.plain_log_probs(model, rows)[0], atol=1e-5, rtol=0)
    got, state = weights_of(strategy), lab.checkpoint_names(model.state_dict())
    assert got.keys() == state.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in state.items())
    with pytest.raises(TrainerError, match="reference is not trainable"):
        strategy.update(Update(rows, 1e-3))


EVERY_SECOND = {"mlp_only_layers": [], "decoder_sparse_step": 2}


@pytest.mark.parametrize(
    "changes", [{"norm_topk_prob": False}, {"num_experts_per_tok": 4}, EVERY_SECOND], ids=["raw", "all", "step"]
)
def test_five_updates_of_experts_are_those_of_plain_torch(
    lab: Any, tmp_path: Path, build: Any, changes: dict[str, Any]
) -> None:
    folder, updates = lab.make_model(tmp_path / "model", "qwen3_moe", False, **changes), lab.five_updates()
    plain = lab.plain_training(folder, updates)
    strategy = build(MegatronConfig(betas=(0.9, 0.95), eps=1e-6, recompute_granularity="full"), model=folder)
    assert_trains_like(plain, strategy, updates)


def test_experts_that_a_folder_holds_as_one_tensor_are_read_as_well(lab: Any, tmp_path: Path, build: Any) -> None:
    folder = lab.make_model(tmp_path / "model", "qwen3_moe", False)
    shutil.copytree(folder, tmp_path / "fused")
    model: Any = load_causal_lm(
        folder, "fp32", "sdpa"
    )  # transformers fuses on loading, and has the tied head under both names
    state = {
        name: tensor.clone() for name, tensor in model.state_dict().items() if name in dict(model.named_parameters())
    }
    assert "model.layers.1.mlp.experts.gate_up_proj" in state
    save_file(state, tmp_path / "fused" / "model.safetensors", {"format": "pt"})
    one_by_one, fused = (weights_of(build(model=each)) for each in (folder, tmp_path / "fused"))
    assert one_by_one.keys() == fused.keys()
    assert all(torch.equal(tensor, fused[name]) for name, tensor in one_by_one.items())
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in fused


def test_a_critic_is_that_of_strategy_torch(lab: Any, qwen2: Path, tmp_path: Path, build: Any) -> None:
    options = {"role": "critic", "head": "value", "objective": Objective(LossChoice("vanilla"), value_clip=0.2)}
    ours, theirs = build(**options), TorchStrategy(TorchConfig(), lab.context_of(qwen2, **options))
    assert ours.transports(ours.config, ours.context) == ()
    for update in lab.five_updates():
        got, expected = ours.update(update), theirs.update(update)
        np.testing.assert_allclose([got.loss, got.grad_norm], [expected.loss, expected.grad_norm], rtol=1e-4, atol=1e-6)
        assert got.sums.keys() == expected.sums.keys()
    rows = lab.make_rows(11, 6)
    np.testing.assert_allclose(ours.values(rows), theirs.values(rows), atol=1e-4)
    ours.export(tmp_path / "critic")
    theirs.export(tmp_path / "torch")
    for folder in (tmp_path / "critic", tmp_path / "torch"):  # either strategy's export is the other's model
        np.testing.assert_allclose(build(model=folder, **options).values(rows), ours.values(rows), atol=1e-4)
    with pytest.raises(TrainerError, match="gives no log-probs"):
        ours.logprobs(rows)


def test_bf16_keeps_fp32_masters_and_nearly_the_gradient_of_fp32(lab: Any, build: Any, tmp_path: Path) -> None:
    update = lab.five_updates()[0]
    half, full = build(dtype="bf16"), build()
    assert half.update(update).grad_norm == pytest.approx(full.update(update).grad_norm, rel=0.05)
    for _ in range(4):
        half.update(evolve(update, lr=1e-6))
    assert all(master.dtype == torch.float32 for master in half.optimizer.masters)
    half.save(tmp_path)
    before = weights_of(half)
    assert all(tensor.dtype == torch.bfloat16 for tensor in before.values())
    expected = half.update(update)
    half.load(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in half.weights())
    again = half.update(update)
    assert (again.loss, again.grad_norm) == (expected.loss, expected.grad_norm)
    half.export(tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_update_without_signal_makes_no_step(lab: Any, build: Any) -> None:
    strategy, update = build(), lab.five_updates()[0]
    strategy.update(update)
    before = weights_of(strategy)
    silent = evolve(
        update,
        rows=evolve(update.rows, columns={**update.rows.columns, "coef": np.zeros(len(update.rows.columns["coef"]))}),
    )
    assert strategy.update(silent).grad_norm == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in strategy.weights())


def test_an_update_whose_loss_is_not_finite_is_skipped_and_the_next_is_as_if_it_had_not_been(
    lab: Any, build: Any
) -> None:
    (strategy, other), update = (build(), build()), lab.five_updates()[0]
    before = weights_of(strategy)
    broken = {**update.rows.columns, "advantages": np.full(len(update.rows.columns["coef"]), np.nan)}
    result = strategy.update(evolve(update, rows=evolve(update.rows, columns=broken)))
    assert (result.skipped, result.sums) == (True, {})
    assert all(torch.equal(tensor, before[name]) for name, tensor in strategy.weights())
    assert strategy.update(update).grad_norm == other.update(update).grad_norm
    expected = weights_of(other)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in strategy.weights())


def test_a_gradient_that_is_not_finite_moves_nothing_though_the_loss_is(lab: Any, build: Any) -> None:
    strategy, update = build(), lab.five_updates()[0]
    before = weights_of(strategy)
    plain_loss = strategy.loss.loss

    def with_endless_slope(view: Any) -> Any:
        loss, metrics = plain_loss(view)
        loss.register_hook(lambda gradient: gradient * np.inf)
        return loss, metrics

    strategy.loss.loss = with_endless_slope
    result = strategy.update(update)
    strategy.loss.loss = plain_loss
    assert (result.skipped, np.isfinite(result.loss), np.isfinite(result.grad_norm)) == (True, True, False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in strategy.weights())
    assert not strategy.update(update).skipped


def test_running_out_of_memory_names_phase_role_and_keys(
    lab: Any, build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, update = build(), lab.five_updates()[0]

    def exhausted(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(strategy.model.decoder, "forward", exhausted)
    with pytest.raises(
        TrainerError, match=r"out of memory, in the update of actor_train\. Fix: .* recompute_granularity: full"
    ):
        strategy.update(update)
    with pytest.raises(
        TrainerError, match=r"out of memory, in log-probs of actor_train\. Fix: lower actor_train\.infer_batch_size"
    ):
        strategy.logprobs(update.rows)
    places = {
        "weights": (lambda: strategy.export(tmp_path), r"the export of actor_train\. Fix: more devices"),
        "new_sender": (
            lambda: strategy.offer("shared_memory", 1),
            r"the offer of weights of actor_train\. Fix: lower model_update_buffer_size_mb",
        ),
        "_facts": (lambda: strategy.save(tmp_path), r"the checkpoint of actor_train\. Fix: more devices"),
        "_parked": (strategy.onload, r"onloading of actor_train\. Fix: devices of its own"),
    }
    for name, (act, named) in places.items():
        with monkeypatch.context() as patch:
            patch.setattr(
                strategy.sending if name == "new_sender" else strategy,
                name,
                SimpleNamespace(back=exhausted) if name == "_parked" else exhausted,
            )
            with pytest.raises(
                OutOfMemory,
                match=rf"^out of memory, in {named}.* or set higher parallel sizes in actor_train\.strategy_args",
            ):
                act()


@pytest.mark.parametrize("distributed", [True, False])
def test_a_role_that_was_away_goes_on_as_if_it_had_stayed(
    lab: Any, build: Any, monkeypatch: pytest.MonkeyPatch, distributed: bool
) -> None:
    """The CPU stands for a device whose memory is given back."""
    monkeypatch.setattr("turnwise_torch.parked.has_own_memory", lambda device: True)
    strategy, stays = (build(MegatronConfig(use_distributed_optimizer=distributed), dtype="bf16") for _ in range(2))
    for update in lab.five_updates():
        strategy.offload()
        strategy.offload()
        assert not sum(
            tensor.untyped_storage().nbytes() for tensor in (*strategy.model.parameters(), *strategy.optimizer.masters)
        )
        strategy.onload()
        assert strategy.update(update).grad_norm == stays.update(update).grad_norm
    expected = weights_of(stays)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in strategy.weights())


def test_the_shim_acts_inside_alone_and_never_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from turnwise_megatron import shim

    before = torch.cuda.current_device
    with shim.cuda_or_cpu(), shim.cuda_or_cpu():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.cuda.current_device is not before
    assert torch.cuda.current_device is before
    assert torch.zeros(1).type() == "torch.FloatTensor"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with shim.cuda_or_cpu():
        assert torch.cuda.current_device is before
        assert torch.zeros(1).type() == "torch.FloatTensor"
