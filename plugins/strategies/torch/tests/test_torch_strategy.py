"""The strategy as the pipeline uses it: log-probs, updates, refusals, transports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM

from turnwise.contracts.loss import LossView
from turnwise.contracts.train import LossChoice, Objective, TrainContext
from turnwise.data.rows import Rows, Update
from turnwise.errors import ConfigError, TrainerError
from turnwise.plugins import registry
from turnwise.testing.compare import says
from turnwise_torch.config import TorchConfig
from turnwise_torch.device import gpu_memory
from turnwise_torch.fixtures import strategy_fixture
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.testing import gradient_of

Build = Callable[..., TorchStrategy]


def weights(strategy: TorchStrategy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in strategy.model.named_parameters()}


def without_signal(update: Update) -> Update:
    columns = {**update.rows.columns, "coef": np.zeros_like(update.rows.columns["coef"])}
    return evolve(update, rows=evolve(update.rows, columns=columns))


@pytest.mark.parametrize("budget", [None, 40])
def test_logprobs_are_those_of_a_plain_forward_pass_at_temperature_seven_tenths(
    build: Build, folder: Path, rows: Rows, budget: int | None
) -> None:
    strategy = build(temperature=0.7, infer_batch_size=3, max_tokens_per_microbatch_in_infer=budget)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    expected = []
    for start, end in zip(rows.offsets[:-1], rows.offsets[1:]):
        ids = torch.from_numpy(rows.input_ids[start:end].astype(np.int64))
        with torch.no_grad():
            every = torch.log_softmax(model(ids[None]).logits[0] / 0.7, -1)
        expected += [float(every[t - 1, ids[t]]) for t in range(len(ids)) if rows.response_mask[start + t]]
    got = strategy.logprobs(rows)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


def test_the_gradient_depends_on_no_micro_batch_budget_order_chunk_or_checkpointing(
    build: Build, update: Update
) -> None:
    whole = gradient_of(build(per_device_train_batch_size=100, max_grad_norm=0.0), update)
    assert whole.norm() > 1e-3
    order = np.random.default_rng(1).permutation(len(update.rows))
    shuffled = evolve(update, rows=update.rows.select(order))
    others = [
        gradient_of(build(per_device_train_batch_size=1, max_grad_norm=0.0), update),
        gradient_of(build(per_device_train_batch_size=3, max_grad_norm=0.0), shuffled),
        gradient_of(build(max_tokens_per_microbatch_in_train=33, max_grad_norm=0.0), update),
        gradient_of(build(TorchConfig(logits_chunk=2), gradient_checkpointing=True, max_grad_norm=0.0), shuffled),
    ]
    for other in others:
        assert float((other - whole).norm() / whole.norm()) <= 1e-6


def test_the_result_does_not_depend_on_micro_batches_either(build: Build, update: Update) -> None:
    one, two = (
        build(per_device_train_batch_size=100).update(update),
        build(per_device_train_batch_size=2).update(update),
    )
    assert one.loss == pytest.approx(two.loss, rel=1e-6)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-6)
    assert set(one.sums) == {f"policy/{name}" for name in ("approx_kl", "clip_frac", "ratio_mean", "entropy", "kl")}
    for name, (x, w) in one.sums.items():
        assert two.sums[name] == pytest.approx((x, w), rel=1e-5, abs=1e-6)
        assert w == pytest.approx(float(np.sum(update.rows.columns["weight"])))


def test_updates_are_those_of_plain_adamw_on_the_same_model_with_each_updates_rate(
    build: Build, folder: Path, update: Update
) -> None:
    strategy = build(
        TorchConfig(betas=(0.9, 0.95), eps=1e-6),
        weight_decay=0.1,
        temperature=0.7,
        objective=Objective(LossChoice("vanilla")),
        max_grad_norm=0.5,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    plain = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95), eps=1e-6
    )
    rows = update.rows
    at = np.flatnonzero(rows.response_mask)
    coef, advantages = (torch.from_numpy(rows.columns[name]).float() for name in ("coef", "advantages"))
    for lr in (1e-3, 3e-3, 0.0, 1e-2, 2e-4):
        result = strategy.update(Update(rows, lr=lr))
        log_probs = []
        for start, end in zip(rows.offsets[:-1], rows.offsets[1:]):
            ids = torch.from_numpy(rows.input_ids[start:end].astype(np.int64))
            every = torch.log_softmax(model(ids[None]).logits[0] / 0.7, -1)
            log_probs += [every[t - 1, ids[t]] for t in range(len(ids)) if rows.response_mask[start + t]]
        assert len(log_probs) == len(at)
        loss = -(coef * advantages * torch.stack(log_probs)).sum()
        plain.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in plain.param_groups:
            group["lr"] = lr
        plain.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    for (name, ours), (_, theirs) in zip(strategy.model.named_parameters(), model.named_parameters()):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5, msg=name)


def test_a_bf16_model_learns_through_fp32_masters_that_start_from_the_folder(
    build: Build, folder: Path, update: Update
) -> None:
    strategy = build(dtype="bf16", gradient_checkpointing=True)
    assert strategy.optimizer is not None
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, p in exact.named_parameters():
        assert torch.equal(strategy.optimizer.masters[name], p)
    before = weights(strategy)
    for _ in range(3):
        strategy.update(evolve(update, lr=1e-6))
    after = weights(strategy)
    assert all(p.dtype == torch.bfloat16 for p in after.values())
    moved = [(strategy.optimizer.masters[name].detach() - p).abs().max() for name, p in exact.named_parameters()]
    assert max(moved) <= 3.1e-6
    assert min(moved) > 0
    same = sum(int((after[name] == before[name]).sum()) for name in before)
    assert same > 0.85 * sum(p.numel() for p in before.values())
    for name, master in strategy.optimizer.masters.items():
        assert torch.equal(after[name], master.detach().bfloat16())


def test_an_update_without_signal_makes_no_step(build: Build, update: Update) -> None:
    strategy = build(weight_decay=0.1)
    strategy.update(update)
    before = weights(strategy)
    result = strategy.update(without_signal(update))
    assert (result.loss, result.grad_norm, dict(result.sums)) == (0.0, 0.0, {})
    assert all(torch.equal(p, before[name]) for name, p in strategy.model.named_parameters())


def test_missing_old_log_probs_give_a_ratio_of_one(build: Build, update: Update) -> None:
    columns = dict(update.rows.columns)
    columns["old_log_probs"] = np.full_like(columns["old_log_probs"], np.nan)
    result = build().update(evolve(update, rows=evolve(update.rows, columns=columns)))
    x, w = result.sums["policy/ratio_mean"]
    assert x / w == 1.0
    assert result.sums["policy/approx_kl"][0] == 0.0


def test_training_raises_the_log_prob_of_rewarded_tokens(build: Build, rows: Rows) -> None:
    strategy = build(objective=Objective(LossChoice("vanilla")))
    columns = {**rows.columns, "advantages": np.ones(len(rows.columns["coef"]))}
    before = strategy.logprobs(rows)
    for _ in range(5):
        strategy.update(Update(evolve(rows, columns=columns), lr=3e-3))
    rewarded = columns["coef"] > 0
    assert (strategy.logprobs(rows) - before)[rewarded].mean() > 0.3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_update_whose_loss_is_not_finite_is_skipped_and_the_next_is_as_if_it_had_not_been(
    build: Build, update: Update, dtype: str
) -> None:
    strategy, other = build(dtype=dtype), build(dtype=dtype)
    columns = {**update.rows.columns, "advantages": np.full(len(update.rows.columns["coef"]), np.nan)}
    before = weights(strategy)
    result = strategy.update(evolve(update, rows=evolve(update.rows, columns=columns)))
    assert result.skipped
    assert np.isnan(result.loss)
    assert not [name for name in result.sums if name.startswith("policy/")]
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in strategy.model.named_parameters())
    got, expected = strategy.update(update), other.update(update)
    assert (got.loss, got.grad_norm, got.sums) == (expected.loss, expected.grad_norm, expected.sums)
    assert not strategy.update(update).skipped


def test_a_gradient_that_is_not_finite_moves_nothing_though_the_loss_is(build: Build, update: Update) -> None:
    strategy = build()
    before = weights(strategy)
    strategy.model.lm_head.weight.register_hook(lambda gradient: gradient * np.inf)  # type: ignore[union-attr, operator]
    result = strategy.update(update)
    assert result.skipped
    assert np.isfinite(result.loss)
    assert not np.isfinite(result.grad_norm)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in strategy.model.named_parameters())


def test_the_memory_of_a_gpu_is_a_metric_and_a_cpu_has_none(
    build: Build, update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [name for name in build().update(update).sums if name.startswith("system/")]
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda device: 3 * 2**29 if device == torch.device("cuda", 1) else 0
    )
    assert gpu_memory(torch.device("cuda", 1)) == {"system/gpu_memory": (1.5, 1.0)}


def test_a_token_outside_the_vocabulary_is_reported(build: Build) -> None:
    rows = Rows(np.array([1, 50], np.int32), np.array([0, 2]), np.array([False, True]))
    with pytest.raises(TrainerError, match="received the token id 50, its model has ids 0 to 49"):
        build().logprobs(rows)


def test_images_are_refused(build: Build) -> None:
    rows = Rows(
        np.array([1, 2], np.int32),
        np.array([0, 2]),
        np.array([False, True]),
        images=((np.zeros((1, 1, 3), np.uint8),),),
    )
    with pytest.raises(TrainerError, match="takes text alone"):
        build().logprobs(rows)


def test_rows_without_responses_give_no_log_probs(build: Build) -> None:
    rows = Rows(np.array([1, 2], np.int32), np.array([0, 2]), np.array([False, False]))
    assert build().logprobs(rows).shape == (0,)
    assert build().logprobs(Rows(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, bool))).shape == (0,)


def test_a_reference_has_no_optimizer_and_does_not_train(build: Build, update: Update) -> None:
    reference = build(role="reference", trainable=False, objective=None, dtype="fp16")
    assert reference.optimizer is None
    assert not any(p.requires_grad for p in reference.model.parameters())
    assert np.isfinite(reference.logprobs(update.rows)).all()
    with pytest.raises(TrainerError, match="reference is not trainable"):
        reference.update(update)
    with pytest.raises(TrainerError, match="reference has no value head"):
        reference.values(update.rows)


def test_a_critic_learns_the_returns(build: Build, rows: Rows) -> None:
    critic = build(role="critic", head="value", objective=Objective(LossChoice("ppo")))
    assert critic.transports(critic.config, critic.context) == ()
    assert (critic.values(rows) == 0).all()
    n = len(rows.columns["coef"])
    columns = {**rows.columns, "coef": np.full(n, 1 / n), "returns": np.sin(np.arange(n)) + 1, "values": np.zeros(n)}
    first = critic.update(Update(evolve(rows, columns=columns), lr=1e-2))
    assert first.loss == pytest.approx(float(np.mean(columns["returns"] ** 2) / 2), rel=1e-5)
    for _ in range(30):
        last = critic.update(Update(evolve(rows, columns=columns), lr=1e-2))
    assert last.loss < first.loss / 4
    x, w = last.sums["critic/value/mean"]
    assert x / w == pytest.approx(float(np.average(columns["returns"], weights=columns["weight"])), abs=0.3)
    with pytest.raises(TrainerError, match="critic has a value head"):
        critic.logprobs(rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "fp16"}, r"actor_train.model_args.dtype: fp16 cannot be trained"),
        ({"temperature": 0.0}, r"needs a sampling temperature over 0"),
        ({"attn_implementation": "flash_attention_2"}, r"needs dtype bf16 or fp16"),
        ({"objective": None}, r"actor_train: trainable, but it has no objective"),
        ({"objective": Objective(LossChoice("ppo"), kl_loss_type="k5")}, r"kl_loss_type: unknown KL estimator 'k5'"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(
    build: Build, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(model=Path("/nowhere"), **changes)


def test_a_missing_package_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    context = TrainContext(
        model=Path("/nowhere"), role="reference", trainable=False, attn_implementation="flash_attention_2"
    )
    (lack,) = TorchStrategy.check(TorchConfig(), context)
    assert lack.machine
    says(str(lack), "$.reference.model_args.attn_implementation", "flash_attention_2", "flash_attn", "Fix: sdpa")


def test_offload_and_onload_change_nothing(build: Build, update: Update) -> None:
    one, two = build(dtype="bf16"), build(dtype="bf16")
    one.update(update)
    two.update(update)
    one.offload()
    one.onload()
    assert one.update(update).loss == two.update(update).loss


def test_a_policy_loss_of_another_plugin_is_used_with_its_metrics(
    build: Build, update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine:
        def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
            return view.extras["versions"] + 1.0 - view.log_probs, {"halves": torch.full_like(view.coef, 0.5)}

    monkeypatch.setattr("turnwise_torch.base.build_loss", lambda objective: Mine())
    x, w = build(objective=Objective(LossChoice("mine"))).update(update).sums["policy/halves"]
    assert x / w == 0.5


def test_the_fixture_of_the_conformance_kit_agrees_with_the_strategy() -> None:
    fixture = strategy_fixture()
    strategy = TorchStrategy(fixture["config"], fixture["context"])
    ids = np.random.default_rng(0).integers(0, fixture["vocab_size"], 12).astype(np.int32)
    mask = np.arange(12) > 0
    expected = fixture["reference_logprobs"](ids, fixture["context"].temperature)
    np.testing.assert_allclose(strategy.logprobs(Rows(ids, np.array([0, 12]), mask)), expected[1:], rtol=0, atol=2e-5)


def test_the_strategy_answers_to_its_name_and_its_aliases() -> None:
    for name in ("torch", "hf_train", "hf_infer"):
        entry = registry().find("train_strategy", name)
        assert entry.target() is TorchStrategy
        assert entry.config_class() is TorchConfig
        assert entry.fixtures() is strategy_fixture
    assert isinstance(strategy_fixture()["context"], TrainContext)
