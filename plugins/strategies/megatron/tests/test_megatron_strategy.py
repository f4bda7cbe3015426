"""One process of the real Megatron: parity with strategy torch, refusals in one line, checkpoints, the shim."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from turnwise.contracts.train import Lora, LossChoice, Objective, Ranks
from turnwise.data.rows import Rows, Update
from turnwise.errors import CheckpointError, ConfigError, OutOfMemory, TrainerError
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


@pytest.fixture
def build(lab: Any, qwen2: Path) -> Iterator[Any]:
    """Build the strategy on the tiny Qwen2; keywords go to the context, `config` is the strategy's. All are closed in
    the end."""
    gc.freeze()  # what is there stays out of the collection below
    made = []

    def make(config: MegatronConfig | None = None, model: Path = qwen2, **changes: Any) -> MegatronStrategy:
        made.append(MegatronStrategy(config, lab.context_of(model, **changes)))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()
    made.clear()
    gc.collect()  # Megatron's cycles hold descriptors


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


def test_sizes_that_the_experts_do_not_allow_are_refused_in_one_line_each(
    lab: Any, tmp_path: Path, qwen2: Path
) -> None:
    def lines(model: Path, size: int, **config: Any) -> list[str]:
        found = [
            str(problem)
            for problem in MegatronStrategy.check(MegatronConfig(**config), lab.context_of(model, ranks=Ranks(0, size)))
        ]
        return [line.removesuffix(f" ({model})") for line in found]

    folder = lab.make_model(tmp_path / "model", "qwen3_moe", False)
    assert lines(folder, 2, expert_model_parallel_size=2) == []
    assert lines(folder, 3, expert_model_parallel_size=3) == [
        "expert_model_parallel_size: 3 does not divide the 4 experts of the model"
    ]
    assert lines(folder, 2, tensor_model_parallel_size=2) == [
        "tensor_model_parallel_size: 2 of a model with experts needs sequence parallelism. Fix: sequence_parallel: true"
    ]
    tensor = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert lines(folder, 2, **tensor) == []
    assert lines(folder, 2, **tensor, expert_tensor_parallel_size=1) == [
        "expert_tensor_parallel_size: 1 needs an expert_model_parallel_size over 1. Fix: remove it"
    ]
    assert lines(qwen2, 2, **tensor, expert_tensor_parallel_size=2) == [
        "expert_tensor_parallel_size: 2, and qwen2 has no experts. Fix: remove it"
    ]
    odd = lab.make_model(tmp_path / "odd", "qwen3_moe", False, moe_intermediate_size=15, num_experts_per_tok=1)
    assert lines(odd, 2, **tensor) == [
        (
            "strategy megatron has no conversion for qwen3_moe with num_experts_per_tok: 1 and norm_topk_prob: true."
            " Fix: strategy_name: torch"
        ),
        "tensor_model_parallel_size: 2 does not divide moe_intermediate_size 15 of the model",
    ]
    (line,) = map(
        str, MegatronStrategy.check(MegatronConfig(engine_args={"moe_aux_loss_coeff": 0.01}), lab.context_of(folder))
    )
    assert line.endswith(
        "moe_aux_loss_coeff: it is Megatron's, and strategy megatron does not support it. Fix: remove it"
    )


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


def test_another_architecture_is_refused_by_name_before_anything_loads(lab: Any, tmp_path: Path, qwen2: Path) -> None:
    facts = json.loads((qwen2 / "config.json").read_text())
    for change, text in [
        ({"model_type": "qwen2_5_vl"}, "no conversion for 'qwen2_5_vl'"),
        ({"model_type": "gemma3"}, "no conversion for 'gemma3'"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None},
            "use_sliding_window: True",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_parameters"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**facts, **change}))
        with pytest.raises(ConfigError, match=text) as caught:
            MegatronStrategy(MegatronConfig(), lab.context_of(tmp_path))
        assert all("\n" not in line and "Fix:" in line for line in caught.value.problems)


def test_images_and_foreign_ids_are_refused(build: Any) -> None:
    strategy = build(trainable=False, objective=None)
    picture = Rows(
        np.array([1, 2], np.int32),
        np.array([0, 2]),
        np.array([False, True]),
        images=((np.zeros((1, 1, 3), np.uint8),),),
    )
    with pytest.raises(TrainerError, match="received images"):
        strategy.logprobs(picture)
    with pytest.raises(TrainerError, match="received the token id 51, its model has ids 0 to 50"):
        strategy.logprobs(Rows(np.array([1, 51], np.int32), np.array([0, 2]), np.array([False, True])))
    assert strategy.logprobs(Rows(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, bool))).shape == (0,)


def test_arguments_of_the_engine_are_compared_with_megatrons_own(lab: Any, qwen2: Path) -> None:
    def lines(**given: Any) -> list[str]:
        return [
            str(problem) for problem in MegatronStrategy.check(MegatronConfig(engine_args=given), lab.context_of(qwen2))
        ]

    assert lines(attention_softmax_in_fp32=True, attention_softmax_in_fp23=1)[0].endswith(
        "Megatron has no such argument. Did you mean 'attention_softmax_in_fp32'? Fix: a field of TransformerConfig or"
        " OptimizerConfig"
    )
    assert lines(distribute_saved_activations=False, overlap_grad_reduce=True, log_num_zeros_in_grad=False) == []
    (line,) = lines(weight_decay=0.1)
    assert line == "$.actor_train.strategy_args.strategy_config.weight_decay: decided by training_args. Fix: remove it"
    (line,) = lines(virtual_pipeline_model_parallel_size=2)
    assert "does not support it" in line


def test_arguments_of_the_engine_reach_it_and_its_refusals_are_one_line(build: Any) -> None:
    strategy = build(MegatronConfig(engine_args={"softmax_scale": 0.5, "log_num_zeros_in_grad": True}))
    assert strategy.model.config.softmax_scale == 0.5
    assert strategy.optimizer.megatron.config.log_num_zeros_in_grad
    with pytest.raises(ConfigError, match="Megatron refuses the configuration: ") as caught:
        build(
            MegatronConfig(
                recompute_granularity="selective",
                recompute_method="uniform",
                engine_args={"recompute_modules": ["nothing"]},
            )
        )
    assert "\n" not in str(caught.value)


def test_what_this_strategy_does_not_do_is_refused_in_one_line_each(lab: Any, qwen2: Path) -> None:
    context = lab.context_of(
        qwen2,
        dtype="fp16",
        use_sequence_packing=True,
        lora=Lora(8, 16),
        frozen=("model.embed_tokens",),
        ranks=Ranks(0, 3),
        temperature=0.0,
    )
    lines = [str(problem) for problem in MegatronStrategy.check(MegatronConfig(tensor_model_parallel_size=2), context)]
    for text in (
        "3 devices are not divisible",
        "fp16",
        "does not pack",
        "LoRA",
        "cannot freeze model.embed_tokens",
        "temperature",
    ):
        assert len([line for line in lines if text in line]) == 1, text
    (line,) = map(
        str,
        MegatronStrategy.check(
            MegatronConfig(pipeline_model_parallel_size=3), lab.context_of(qwen2, ranks=Ranks(0, 3))
        ),
    )
    assert "does not divide the 2 layers" in line
    (line,) = map(
        str,
        MegatronStrategy.check(MegatronConfig(expert_model_parallel_size=2), lab.context_of(qwen2, ranks=Ranks(0, 2))),
    )
    assert "qwen2 has no experts" in line


def test_a_state_of_another_run_or_a_damaged_one_is_refused(build: Any, tmp_path: Path) -> None:
    strategy = build()
    with pytest.raises(CheckpointError, match="no training state of strategy megatron"):
        strategy.load(tmp_path)
    strategy.save(tmp_path)
    with pytest.raises(
        CheckpointError,
        match="is of the layout tensor 1, pipeline 1, context 1, data 1, distributed optimizer, this run has",
    ):
        build(MegatronConfig(use_distributed_optimizer=False)).load(tmp_path)
    with pytest.raises(CheckpointError, match="was saved with dtype 'fp32'"):
        build(dtype="bf16").load(tmp_path)
    file = tmp_path / "rank-00000" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        strategy.load(tmp_path)


@pytest.mark.parametrize("distributed", [True, False])
def test_a_role_that_was_away_goes_on_as_if_it_had_stayed(
    lab: Any, build: Any, monkeypatch: pytest.MonkeyPatch, distributed: bool
) -> None:
    """The CPU stands for a device whose memory is given back."""
    monkeypatch.setattr("turnwise_megatron.strategy.has_own_memory", lambda device: True)
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
