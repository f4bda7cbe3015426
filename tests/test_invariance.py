"""For fixed rows the gradient of an optimizer step is the same, whatever cut, order, padding, budget or ranks: every
loss, mode and unit.

As a script this file is one of two ranks: `test_invariance.py RANK PORTS MODEL OUT`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from turnwise.config.schema import (
    CorrectionFilter,
    ImportanceWeight,
    Role,
    TrainInferCorrection,
)
from turnwise.contracts.batch_adjust import PlannedUpdate
from turnwise.contracts.train import LossChoice, Objective, Ranks, TrainContext
from turnwise.data.rows import Update
from turnwise.pipeline.aggregation import MODES, UNITS
from turnwise.pipeline.correction import corrected
from turnwise.pipeline.updates import updates
from turnwise.plugins import registry
from turnwise.ports import free_port
from turnwise.testing.ranks import run_ranks
from turnwise.testing.runs import one_step
from turnwise.testing.synthetic import batch_of, row_per_turn, trajectories
from turnwise_torch import models
from turnwise_torch.config import TorchConfig
from turnwise_torch.fixtures import tiny_model
from turnwise_torch.head import token_log_probs
from turnwise_torch.microbatch import Layout, MicroBatch
from turnwise_torch.objective import build_loss, column_tensors, objective_columns, policy_objective
from turnwise_torch.strategy import TorchStrategy

SHIPPED = ("ppo", "vanilla", "tis", "topr", "cispo", "kimi15", "gspo", "gmpo", "sapo", "dppo")
FURTHER: dict[str, tuple[str, dict[str, Any], str]] = {
    "ppo per segment, dual clip": ("ppo", {"dual_clip_loss": True}, "segment"),
    "cispo per segment": ("cispo", {"cispo_epsilon_low": 0.1, "cispo_epsilon_high": 0.1}, "segment"),
    "topr by score": ("topr", {"topr_sign": "score"}, "token"),
    "gspo per row": ("gspo", {"gspo_level": "sample", "gspo_clip_low": 0.1, "gspo_clip_high": 0.1}, "token"),
    "dppo, narrow": ("dppo", {"dppo_delta": 0.004}, "token"),
    "dppo by divergence, narrow": ("dppo", {"dppo_mask": "binary_kl", "dppo_delta": 0.002}, "token"),
}
LOSSES = {**{name: (name, {}, "token") for name in SHIPPED}, **FURTHER}
STEPS = tuple(itertools.product(MODES, UNITS))
VOCABULARY = 50


@frozen
class Cut:
    """One way to run an update: the order of its rows, rows or tokens of a micro-batch, logits at a time, several
    samples in one row."""

    order: str = "as planned"
    rows: int = 100
    budget: int | None = None
    chunk: int = 0
    packed: bool = False


WHOLE = Cut()
ALONE = Ranks()
CUTS = (
    Cut(rows=1, chunk=3),
    Cut("reversed", rows=4),
    Cut("shuffled", rows=3, chunk=5),
    Cut("shuffled", rows=1, budget=37),
    Cut("shuffled", budget=150, packed=True),
)


def objective(loss: str) -> Objective:
    name, options, ratio_type = LOSSES[loss]
    config: Any = registry().find("policy_loss", name).config_class()
    return Objective(LossChoice(name, config(**options)), kl_loss_type="k3", ratio_type=ratio_type)  # type: ignore[arg-type]


@cache
def update(mode: Any, unit: Any) -> Update:
    """The one update of a step: rows of five trajectories of one to four turns, two of them copied, tokens weighted and
    filtered."""
    batch = batch_of(trajectories(2, 3, vocabulary=VOCABULARY), row_per_turn)
    draw = np.random.default_rng(0)
    columns = {
        name: np.zeros(len(batch.tokens))
        for name in ("advantages", "old_log_probs", "infer_log_probs", "ref_log_probs")
    }
    for name, column in columns.items():
        noise = draw.normal(size=len(batch.sampled))
        column[batch.sampled] = 0.3 + noise if name == "advantages" else -np.log(VOCABULARY) + 0.3 * noise
    config = one_step(
        rollout_batch_size=6,
        sequence_length=64,
        loss_agg_mode=mode,
        loss_agg_unit=unit,
        entropy_loss_coef=0.01,
        train_infer_correction=TrainInferCorrection(
            ImportanceWeight(True, "segment"), (CorrectionFilter(ratio_enabled=True, ratio_low=0.6, ratio_high=1.6),)
        ),
    )
    batch, found = corrected(batch.with_tokens(**columns), config)
    assert 0 < found["correction/filtered_frac"] < 0.5
    rows = np.concatenate([np.arange(len(batch.samples)), [0, 2]])
    (made,) = updates(batch, [PlannedUpdate(rows, 1.0 / np.bincount(rows)[rows])], config, Role(), 0, 0.1)
    return made


def arranged(whole: Update, cut: Cut) -> Update:
    order = np.arange(len(whole.rows))
    if cut.order != "as planned":
        order = order[::-1] if cut.order == "reversed" else np.random.default_rng(1).permutation(order)
    return evolve(whole, rows=whole.rows.select(order))


class Double:
    """The objective called directly in float64: one forward pass per cut serves every loss and aggregation."""

    def __init__(self, model: Path) -> None:
        self.model = models.load_causal_lm(model, "fp64", "sdpa")
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def gradients(self, cut: Cut, rank: int = 0, ranks: int = 1) -> Iterator[tuple[str, Tensor]]:
        """(combination, flat gradient), over the rows that fall to `rank`."""
        layout, passes = None, []
        for mode, unit in STEPS:
            mine = dealt(arranged(update(mode, unit), cut), rank, ranks)
            if layout is None:
                layout = Layout(mine.rows)
                passes = [self._forward(batch, cut) for batch in micro_batches(layout, cut)]
            columns = objective_columns(mine)
            for loss in LOSSES:
                built, wanted, total = build_loss(objective(loss)), objective(loss), torch.zeros(0)
                for responses, *outputs in passes:
                    leaves = [x.detach().requires_grad_() for x in outputs]
                    tensors = column_tensors(columns, responses, leaves[0])
                    value, _ = policy_objective(
                        leaves[0], leaves[1], tensors, built, wanted, mine.entropy_coef, mine.kl_coef
                    )
                    slopes = torch.autograd.grad(value, leaves)
                    parts = torch.autograd.grad(outputs, self.parameters, slopes, retain_graph=True)
                    flat = torch.cat([part.flatten() for part in parts])
                    total = flat if not len(total) else total + flat
                yield f"{loss}, {mode}, {unit}", total

    def _forward(self, batch: MicroBatch, cut: Cut) -> tuple[Any, ...]:
        outputs = token_log_probs(self.model, batch, 0.7, chunk=cut.chunk, entropy=True, entropy_gradient=True)
        return batch.responses, *outputs


def micro_batches(layout: Layout, cut: Cut) -> Iterator[MicroBatch]:
    cpu = torch.device("cpu")
    if cut.packed:
        assert cut.budget is not None
        return (layout.packed_batch(rows, cpu) for rows in layout.pack(cut.budget))
    return (layout.micro_batch(samples, cpu) for samples in layout.cut(cut.rows, cut.budget))


def dealt(whole: Update, rank: int, ranks: int) -> Update:
    """The rows of one rank; their coefficients are those of the whole update."""
    return evolve(whole, rows=whole.rows.select(np.arange(rank, len(whole.rows), ranks)))


def single(model: Path, cut: Cut, ranks: Ranks = ALONE) -> Iterator[tuple[str, Tensor]]:
    """The same in float32 through the strategy: the gradient that its step would use; of several ranks (FSDP2) that of
    all."""
    context = TrainContext(
        model=model, role="actor_train", dtype="fp32", gradient_checkpointing=False, temperature=0.7, max_grad_norm=0.0,
        objective=objective("ppo"), per_device_train_batch_size=cut.rows, max_tokens_per_microbatch_in_train=cut.budget,
        max_tokens_per_microbatch_in_infer=cut.budget, use_sequence_packing=cut.packed, ranks=ranks,
    )  # fmt: skip
    strategy = TorchStrategy(TorchConfig(logits_chunk=cut.chunk), context)
    optimizer = strategy.optimizer
    assert optimizer is not None
    seen: list[Tensor] = []
    # The gradient before the optimizer takes its shards: it shows nowhere afterwards.
    whole = strategy._whole
    optimizer.step = lambda lr: seen.append(
        torch.cat([whole(m.grad).flatten() for m in optimizer.masters.values() if m.grad is not None])
    )  # type: ignore[method-assign]
    for loss, (mode, unit) in itertools.product(SHIPPED, STEPS):
        strategy.context = evolve(context, objective=objective(loss))
        strategy.loss = build_loss(objective(loss))
        strategy.update(dealt(arranged(update(mode, unit), cut), ranks.rank, ranks.size))
        yield f"{loss}, {mode}, {unit}", seen.pop()
    strategy.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("invariance"), vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def double(model: Path) -> Double:
    return Double(model)


@pytest.fixture(scope="module")
def whole_double(double: Double) -> dict[str, Tensor]:
    return dict(double.gradients(WHOLE))


@pytest.fixture(scope="module")
def whole_single(model: Path) -> dict[str, Tensor]:
    return dict(single(model, WHOLE))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    off = {name: float((found[name] - g).norm() / g.norm()) for name, g in expected.items()}
    assert {name: error for name, error in off.items() if not error <= bound} == {}


def test_the_update_is_worth_testing(whole_double: dict[str, Tensor]) -> None:
    """Copies, weights, filtered tokens; every shipped loss, and every loss and mode with a gradient of its own
    (token-mean knows no unit)."""
    made = update("token-mean", "trajectory")
    assert {e.name for e in registry().entries("policy_loss") if e.distribution == "turnwise-losses"} == set(SHIPPED)
    columns = made.rows.columns
    assert {0.5, 1.0} == set(columns["weight"].tolist())
    assert 0 < (columns["coef"] == 0).mean() < 0.5
    assert len(np.unique(columns["policy_weight"])) > 3
    assert len(whole_double) == len(LOSSES) * len(STEPS)
    norms = {name: float(g.norm()) for name, g in whole_double.items()}
    assert min(norms.values()) > 1e-3
    assert len({round(norm, 9) for norm in norms.values()}) == len(LOSSES) * (len(STEPS) - 1)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_no_cut_changes_the_gradient_in_float64(double: Double, whole_double: dict[str, Tensor], cut: Cut) -> None:
    assert_same(dict(double.gradients(cut)), whole_double, 1e-10)


@pytest.mark.parametrize("cut", CUTS[2:], ids=str)
def test_no_cut_changes_the_gradient_of_the_strategy_in_float32(
    model: Path, whole_single: dict[str, Tensor], cut: Cut
) -> None:
    assert_same(dict(single(model, cut)), whole_single, 1e-6)


def test_the_strategys_gradient_is_the_objectives(
    whole_single: dict[str, Tensor], whole_double: dict[str, Tensor]
) -> None:
    assert_same(
        {name: g.double() for name, g in whole_single.items()},
        {name: whole_double[name] for name in whole_single},
        1e-4,
    )


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one(
    model: Path, whole_double: dict[str, Tensor], whole_single: dict[str, Tensor], tmp_path: Path
) -> None:
    """Rows dealt to two processes: gradients summed by gloo's all-reduce, and those of the strategy on two ranks
    (FSDP2)."""
    command = [sys.executable, __file__]
    ports = f"{free_port()},{free_port()}"
    codes, said = run_ranks(
        lambda rank: [*command, str(rank), ports, str(model), str(tmp_path / f"{rank}.pt")],
        2,
        tmp_path,
        environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert codes == [0, 0], said
    for number in range(2):
        summed = torch.load(tmp_path / f"{number}.pt")
        assert_same(summed["double"], whole_double, 1e-10)
        assert_same(summed["fsdp"], whole_single, 1e-6)


def be_a_rank(rank: int, ports: str, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    first, second = ports.split(",")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{first}", rank=rank, world_size=2)
    cut = Cut(rows=3)
    double = dict(Double(model).gradients(cut, rank, 2))
    for gradient in double.values():
        dist.all_reduce(gradient)
    dist.destroy_process_group()
    torch.save({"double": double, "fsdp": dict(single(model, cut, Ranks(rank, 2, rank, f"127.0.0.1:{second}")))}, out)


if __name__ == "__main__":
    be_a_rank(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
