"""The strategy in one process: parity with plain torch, failures, adapters, images, checkpoints, the conformance
kit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from deepspeed_cases import FORMS, context, five_updates, furthest, make_picture_rows, make_rows, run_updates, zero

from turnwise.contracts.train import Lora, LossChoice, Objective
from turnwise.data.rows import Update
from turnwise.errors import ConfigError, OutOfMemory, TrainerError
from turnwise_deepspeed import memory
from turnwise_torch.fixtures import tiny_vision_model
from turnwise_torch.models import load_causal_lm
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.testing import weights_of

deepspeed = pytest.importorskip(
    "deepspeed", reason="deepspeed is not installed (pip install 'turnwise-deepspeed[deepspeed]')"
)
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

Build = Callable[..., Any]
VANILLA = Objective(LossChoice("vanilla"))
forms = pytest.mark.parametrize("form", FORMS)


@forms
def test_five_updates_are_those_of_plain_torch_with_checkpointed_layers_and_head(
    build: Build, plain: Callable[..., Any], form: str
) -> None:
    expected, weights = plain()
    strategy = build(evolve(FORMS[form], logits_chunk=7), gradient_checkpointing=True)
    for one, other in zip(run_updates(strategy), expected, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
        assert one.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-6)
    assert furthest(weights_of(strategy), weights) <= 1e-5


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form == "3" else pytest.mark.matrix) for form in FORMS]
)
def test_bf16_has_the_norms_of_plain_torch(build: Build, plain: Callable[..., Any], form: str) -> None:
    expected, weights = plain(dtype="bf16")
    strategy = build(FORMS[form], dtype="bf16")
    for one, other in zip(run_updates(strategy), expected, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=5e-3)
    got = weights_of(strategy)
    assert {tensor.dtype for tensor in got.values()} == {torch.bfloat16}
    assert furthest(got, weights) <= 2**-8  # one step of bf16 at 1, where the norms' weights are


@pytest.mark.parametrize("form", ["0", "2", "3"])
def test_masters_of_bf16_start_from_the_folder_s_own_values(build: Build, folder: Path, form: str) -> None:
    strategy = build(FORMS[form], dtype="bf16")
    strategy.update(Update(make_rows(0, 3), lr=0.0))
    strategy.save(folder.parent / f"masters-{form}")
    loaded = dict(load_causal_lm(folder, "fp32", "sdpa").named_parameters())
    if form == "0":
        groups = strategy.engine.optimizer
        pairs = [pair for low, high in zip(groups.fp16_groups, groups.fp32_groups) for pair in zip(low, high)]
        masters = {id(parameter): master for parameter, master in pairs}
        found = {name: masters[id(p)] for name, p in strategy.model.named_parameters()}
    else:
        found = {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in strategy.model.named_parameters()}
    for name, value in loaded.items():
        assert torch.equal(found[name].view_as(value), value), name


@forms
def test_an_update_whose_loss_is_not_finite_is_skipped_and_the_next_is_as_if_it_had_not_been(
    build: Build, plain: Callable[..., Any], form: str
) -> None:
    strategy = build(FORMS[form])
    first, *_ = five_updates()
    advantages = np.array(first.rows.columns["advantages"])
    advantages[-1] = np.inf
    columns = {**first.rows.columns, "advantages": advantages, "coef": np.full(len(advantages), 0.1)}
    before = weights_of(strategy)
    result = strategy.update(evolve(first, rows=evolve(first.rows, columns=columns)))
    assert (result.skipped, result.sums) == (True, {})
    assert furthest(weights_of(strategy), before) == 0.0
    assert strategy.update(first).grad_norm == pytest.approx(plain()[0][0].grad_norm, rel=1e-4)


@forms
def test_a_gradient_that_is_not_finite_moves_nothing_though_the_loss_is(
    build: Build, plain: Callable[..., Any], form: str
) -> None:
    strategy = build(FORMS[form])
    first, *_ = five_updates()
    before = weights_of(strategy)
    plain_loss = strategy.loss.loss

    def with_endless_slope(view: Any) -> Any:
        loss, metrics = plain_loss(view)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * np.inf)
        return loss, metrics

    strategy.loss.loss = with_endless_slope
    result = strategy.update(first)
    assert (result.skipped, np.isfinite(result.loss), np.isfinite(result.grad_norm)) == (True, True, False)
    assert furthest(weights_of(strategy), before) == 0.0
    strategy.loss.loss = plain_loss
    assert strategy.update(first).grad_norm == pytest.approx(plain()[0][0].grad_norm, rel=1e-4)


@forms
def test_an_update_that_fails_half_way_leaves_no_gradient(build: Build, plain: Callable[..., Any], form: str) -> None:
    strategy = build(FORMS[form])
    plain_loss, calls = strategy.loss.loss, []

    def failing(view: Any) -> Any:
        calls.append(view)
        if len(calls) == 2:
            raise TrainerError("half way")
        return plain_loss(view)

    first, *_ = five_updates()
    strategy.loss.loss = failing
    with pytest.raises(TrainerError, match="half way"):
        strategy.update(first)
    strategy.loss.loss = plain_loss
    assert strategy.update(first).grad_norm == pytest.approx(plain()[0][0].grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("owner", "name", "act", "expected"),
    [
        (
            "model",
            "forward",
            lambda s, f: s.logprobs(make_rows(0, 2)),
            r"log-probs of actor_train\. Fix: lower actor_train\.infer_batch_size",
        ),
        (
            "",
            "weights",
            lambda s, f: s.export(f),
            r"the export of actor_train\. Fix: more devices .*deepspeed_zero3_cpuoffload",
        ),
        (
            "sending",
            "new_sender",
            lambda s, f: s.offer("shared_memory", 1),
            r"the offer of weights of actor_train\. Fix: lower model_update_buffer",
        ),
        (
            "engine",
            "save_checkpoint",
            lambda s, f: s.save(f),
            r"the checkpoint of actor_train\. Fix: more devices .*deepspeed_zero3_cpuoffload",
        ),
        (
            "engine",
            "load_checkpoint",
            lambda s, f: (s.save(f), s.load(f)),
            r"resuming of actor_train\. Fix: more devices",
        ),
        (
            "",
            "_parked",
            lambda s, f: s.onload(),
            r"onloading of actor_train\. Fix: devices of its own .*deepspeed_zero3_cpuoffload",
        ),
    ],
)
def test_running_out_of_memory_names_phase_role_and_keys(
    build: Build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    name: str,
    act: Callable[..., Any],
    expected: str,
) -> None:
    def exhausted(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    exhausted.back = exhausted  # type: ignore[attr-defined]
    strategy = build(zero(2))
    target = strategy.model.base_model if owner == "model" else getattr(strategy, owner) if owner else strategy
    monkeypatch.setattr(target, name, exhausted)
    with pytest.raises(OutOfMemory, match=rf"^out of memory, in {expected}") as caught:
        act(strategy, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_take_what_plan_counts_for_them(build: Build, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Looked at when all micro-batches of an update are summed. Where DeepSpeed keeps the sums differs by stage."""
    strategy = build(zero(stage), dtype="bf16")
    strategy.update(Update(make_rows(0, 6), lr=1e-3))  # buffers are made at the first
    optimize, found = strategy._optimize, list[torch.Tensor]()

    def look(lr: float) -> float:
        names = ("fp32_groups_gradients_flat", "averaged_gradients")
        found.extend(memory._reachable([getattr(strategy.engine.optimizer, name, None) for name in names]))
        found.extend(p.grad for p in strategy.model.parameters() if p.grad is not None)
        return float(optimize(lr))

    monkeypatch.setattr(strategy, "_optimize", look)
    strategy.update(Update(make_rows(1, 6), lr=1e-3))
    count = sum(getattr(p, "ds_numel", p.numel()) for p in strategy.model.parameters())
    bytes_held = sum({t.data_ptr(): t.nbytes for t in found}.values())
    expected = strategy.config.memory({"parameters": count, "dtype": "bf16", "world": 1})["gradients"]
    assert expected <= bytes_held <= 1.01 * expected  # sums are padded to whole blocks


def own_memory(model: torch.nn.Module) -> None:
    """What is still mapped from the model's file is copied, as it is on its way to a GPU."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


def bytes_on_the_device(strategy: Any) -> int:
    tensors = memory.states(strategy.model, strategy.engine, torch.device("cpu"))
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@forms
def test_a_role_that_was_away_goes_on_as_if_it_had_stayed(
    build: Build, monkeypatch: pytest.MonkeyPatch, form: str, dtype: str
) -> None:
    """The CPU stands for a device whose memory is given back. DeepSpeed's own method asserts its FusedAdam, or is not
    there."""
    monkeypatch.setattr("turnwise_torch.parked.has_own_memory", lambda device: True)
    strategy, stays = build(FORMS[form], dtype=dtype), build(FORMS[form], dtype=dtype)
    own_memory(strategy.model)
    for update in five_updates():
        held = bytes_on_the_device(strategy)
        strategy.offload()
        strategy.offload()
        assert held > 10_000
        assert bytes_on_the_device(strategy) < held / 100
        strategy.onload()
        assert strategy.update(update).grad_norm == stays.update(update).grad_norm
    assert furthest(weights_of(strategy), weights_of(stays)) == 0.0
    strategy.offload()  # and is closed so


@pytest.mark.parametrize("stage", [2, 3])
def test_a_reference_that_was_away_answers_as_before(build: Build, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    monkeypatch.setattr("turnwise_torch.parked.has_own_memory", lambda device: True)
    reference = build(zero(stage), trainable=False, objective=None, role="reference")
    own_memory(reference.model)
    before = reference.logprobs(make_rows(0, 4))
    reference.offload()
    assert bytes_on_the_device(reference) == 0
    reference.onload()
    np.testing.assert_array_equal(reference.logprobs(make_rows(0, 4)), before)


def test_an_update_without_signal_makes_no_step(build: Build) -> None:
    strategy = build(zero(3))
    first, *_ = five_updates()
    before = weights_of(strategy)
    columns = {**first.rows.columns, "coef": np.zeros(len(first.rows.columns["coef"]))}
    result = strategy.update(evolve(first, rows=evolve(first.rows, columns=columns)))
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
    assert furthest(weights_of(strategy), before) == 0.0


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("pictures"))


class ZeroWhereUnused(TorchStrategy):
    """Plain torch, but a parameter that no row of an update uses has a gradient of zero instead of none: it is stepped,
    as DeepSpeed does."""

    def _optimize(self, lr: float) -> float:
        assert self.optimizer is not None
        for master in self.optimizer.masters.values():
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad
        return super()._optimize(lr)


@pytest.mark.parametrize("form", ["2 optimizer", "3", "3 optimizer param"])
def test_images_train_and_a_row_without_one_adds_nothing_to_the_vision_tower(
    build: Build, pictures: Path, form: str
) -> None:
    """DeepSpeed alone would go on with the tower's gradient of the update before."""
    options = {"objective": VANILLA, "per_device_train_batch_size": 1}
    updates = [
        Update(make_picture_rows(pictures, shown, i), lr=1e-3)
        for i, shown in enumerate([(True, True), (False, True), (False, False), (True, False)])
    ]
    expected = ZeroWhereUnused(None, context(pictures, **options))
    strategy = build(FORMS[form], model=pictures, **options)
    np.testing.assert_allclose(strategy.logprobs(updates[0].rows), expected.logprobs(updates[0].rows), atol=2e-6)
    for one, other in zip(run_updates(strategy, updates), run_updates(expected, updates), strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    assert furthest(weights_of(strategy), weights_of(expected)) <= 1e-5


@pytest.mark.parametrize("form", ["2", "3"])
def test_adapters_alone_are_trained_saved_and_added_to_what_leaves(
    build: Build, folder: Path, tmp_path: Path, form: str
) -> None:
    pytest.importorskip("peft", reason="peft is not installed (pip install 'turnwise-torch[lora]')")
    options = {"lora": Lora(rank=4, alpha=8, target=("q_proj", "down_proj")), "seed": 3}
    expected, strategy = TorchStrategy(None, context(folder, **options)), build(FORMS[form], **options)
    start = weights_of(strategy)
    for one, other in zip(run_updates(strategy), run_updates(expected), strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    trained = weights_of(strategy)
    assert furthest(trained, weights_of(expected)) <= 1e-5
    moved = {
        name.rpartition(".layers.")[2].split(".", 1)[-1]
        for name in trained
        if not torch.equal(trained[name], start[name])
    }
    assert moved == {"self_attn.q_proj.weight", "mlp.down_proj.weight"}
    strategy.save(tmp_path / "state")
    other = build(FORMS[form], **options)
    other.load(tmp_path / "state")
    assert furthest(weights_of(other), trained) == 0.0
    strategy.export(tmp_path / "export")
    assert (tmp_path / "export" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("form", ["1", "3"])
def test_frozen_parameters_stay(build: Build, form: str) -> None:
    strategy = build(FORMS[form], frozen=("model.layers.0.",))
    before = weights_of(strategy)
    run_updates(strategy)
    after = weights_of(strategy)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == name.startswith("model.layers.0."), name


def test_a_reference_of_stage_2_is_a_model_without_an_engine(build: Build, folder: Path) -> None:
    reference = build(zero(2), trainable=False, objective=None, role="reference", dtype="bf16")
    expected = TorchStrategy(None, context(folder, trainable=False, objective=None, dtype="bf16"))
    assert reference.engine is None
    np.testing.assert_array_equal(reference.logprobs(make_rows(0, 4)), expected.logprobs(make_rows(0, 4)))
    with pytest.raises(TrainerError, match="not trainable"):
        reference.update(five_updates()[0])


def test_what_check_finds_is_refused_when_it_is_built(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"\.train_batch_size: set by the run"):
        build(evolve(zero(2), engine_args={"train_batch_size": 8}))


def test_the_conformance_kit_passes_without_a_skip() -> None:
    code = (
        "import gc, deepspeed, turnwise_deepspeed.strategy; gc.freeze()\nfrom turnwise.testing.kit import"
        " run_conformance\n"
    )
    code += "raise SystemExit(run_conformance('deepspeed', kind='train_strategy', strict=True))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
