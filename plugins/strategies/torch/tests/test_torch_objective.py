"""The objective: KL estimators, ratios, metric sums, value loss, and a gradient that no cutting changes (fp64)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from turnwise.contracts.loss import LossView
from turnwise.contracts.train import LossChoice, Objective
from turnwise.data.rows import Rows, Update
from turnwise.errors import PluginError, TrainerError
from turnwise_torch import models
from turnwise_torch.head import token_log_probs
from turnwise_torch.microbatch import Layout
from turnwise_torch.objective import (
    KL_ALIASES,
    build_loss,
    column_tensors,
    kl_estimator,
    log_ratio,
    loss_view,
    metric_sums,
    objective_columns,
    policy_objective,
    token_kl,
    value_objective,
)


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Linear:
    """−A·ratio, with a metric of its own."""

    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        return -view.advantages * view.log_ratio.exp(), {"mine": view.advantages}


def columns(n: int, **changes: Tensor) -> dict[str, Tensor]:
    zeros = torch.zeros(n, dtype=torch.int64)
    base = {"coef": torch.ones(n), "weight": torch.ones(n), "advantages": torch.ones(n)}
    base = {name: value.double() for name, value in base.items()}
    return {**base, "sample": zeros, "turn": zeros, "trajectory": zeros, **changes}


@pytest.mark.parametrize(
    ("name", "expected"), [("k1", 0.4054651), ("abs", 0.4054651), ("k2", 0.0822010), ("k3", 0.0721318)]
)
def test_kl_estimators_at_the_reference_point(name: str, expected: float) -> None:
    assert token_kl(double(math.log(0.3)), double(math.log(0.2)), name).item() == pytest.approx(expected, abs=1e-6)


def test_kl_aliases_and_signs() -> None:
    assert KL_ALIASES == {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    for alias, name in KL_ALIASES.items():
        assert kl_estimator(alias) is kl_estimator(name)
    at = double(math.log(0.2)), double(math.log(0.3))
    assert token_kl(*at, "k1").item() == pytest.approx(-0.4054651)
    assert token_kl(*at, "abs").item() == pytest.approx(0.4054651)
    assert token_kl(*at, "k3").item() == pytest.approx(1.5 - 1 - math.log(1.5))
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_estimator("k4")


def test_log_ratios_are_clamped_to_20_and_results_are_not() -> None:
    assert token_kl(double(-100.0), double(0.0), "k3").item() == pytest.approx(math.exp(20) - 21)
    assert log_ratio(double(-100.0, 100.0), double(0.0, 0.0), "token", torch.zeros(2, dtype=torch.int64)).tolist() == [
        -20.0,
        20.0,
    ]


def test_the_segment_ratio_is_the_mean_with_each_tokens_own_gradient() -> None:
    log_probs = double(0.1, -0.04, 0.06, 0.5).requires_grad_()
    ratio = log_ratio(log_probs, torch.zeros(4, dtype=torch.float64), "segment", torch.tensor([0, 0, 0, 1])).exp()
    assert ratio.tolist() == pytest.approx([1.0408108, 1.0408108, 1.0408108, math.exp(0.5)], abs=1e-6)
    (ratio * double(1.0, 2.0, 4.0, 8.0)).sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([1.0408108, 2.0816215, 4.163243, 8 * math.exp(0.5)], abs=1e-5)


def test_a_segment_is_a_turn_of_a_trajectory() -> None:
    mine = columns(
        4, turn=torch.tensor([0, 0, 0, 1]), trajectory=torch.tensor([0, 0, 1, 1]), old_log_probs=torch.zeros(4).double()
    )
    view = loss_view(double(0.2, 0.4, 0.6, 0.8), None, mine, "segment")
    assert view.log_ratio.tolist() == pytest.approx([0.3, 0.3, 0.6, 0.8])


def test_old_log_probs_that_are_nan_or_absent_become_the_new_ones_detached() -> None:
    log_probs = double(-1.0, -2.0).requires_grad_()
    for old in ({"old_log_probs": double(float("nan"), -1.5)}, {}):
        view = loss_view(log_probs, None, columns(2, **old), "token")
        assert view.old_log_probs.tolist() == [-1.0, -1.5 if old else -2.0]
        assert not view.old_log_probs.requires_grad
        assert view.log_ratio[0].item() == 0.0


def test_unknown_columns_reach_the_loss_by_name_and_incomplete_sampler_log_probs_do_not(rows: Rows) -> None:
    chosen = objective_columns(Update(rows, lr=0.0))
    assert "infer_log_probs" not in chosen
    tensors = column_tensors(chosen, np.arange(5), double(0.0))
    view = loss_view(double(*[-1.0] * 5), None, tensors, "token")
    assert view.infer_log_probs is None
    assert view.ref_log_probs.dtype == torch.float64
    assert set(view.extras) == {"weight", "versions"}
    assert view.extras["versions"].dtype == torch.int64


def test_an_update_without_coefficients_is_reported() -> None:
    rows = Rows(np.arange(3, dtype=np.int32), np.array([0, 3]), np.array([False, True, True]), {"weight": np.ones(2)})
    with pytest.raises(TrainerError, match="needs the column 'coef', it has: weight"):
        objective_columns(Update(rows, lr=0.0))


def test_the_objective_is_the_sum_of_coef_times_loss_minus_entropy_plus_kl() -> None:
    mine = columns(
        3,
        coef=double(0.5, 0.25, 0.0),
        weight=double(1.0, 0.5, 1.0),
        advantages=double(2.0, -1.0, 3.0),
        old_log_probs=double(-1.0, -2.0, -3.0),
        ref_log_probs=double(-1.5, -2.0, -3.0),
    )
    log_probs, entropy = double(-0.9, -2.2, -3.0).requires_grad_(), double(1.0, 2.0, 3.0).requires_grad_()
    total, sums = policy_objective(
        log_probs, entropy, mine, Linear(), Objective(LossChoice("mine"), kl_loss_type="k2"), 0.01, 0.1
    )
    ratios = [math.exp(0.1), math.exp(-0.2), 1.0]
    kls = [0.6**2 / 2, 0.2**2 / 2, 0.0]
    losses = [-2.0 * ratios[0], ratios[1], -3.0]
    expected = sum(c * (x - 0.01 * h + 0.1 * k) for c, x, h, k in zip([0.5, 0.25, 0.0], losses, [1, 2, 3], kls))
    assert total.item() == pytest.approx(expected, abs=1e-12)

    def mean(values: list[float]) -> float:
        return values[0] + 0.5 * values[1] + values[2]

    shown = {name: (float(x), float(w)) for name, (x, w) in sums.items()}
    assert set(shown) == {"policy/approx_kl", "policy/ratio_mean", "policy/entropy", "policy/kl", "policy/mine"}
    assert {w for _, w in shown.values()} == {2.5}
    assert shown["policy/ratio_mean"][0] == pytest.approx(mean(ratios))
    assert shown["policy/approx_kl"][0] == pytest.approx(mean([r - 1 - math.log(r) for r in ratios]))
    assert shown["policy/entropy"][0] == pytest.approx(mean([1, 2, 3]))
    assert shown["policy/kl"][0] == pytest.approx(mean(kls))
    assert shown["policy/mine"][0] == pytest.approx(mean([2, -1, 3]))
    total.backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.005, -0.0025, 0.0])


def test_the_policy_weight_multiplies_the_policy_loss_and_neither_entropy_nor_kl() -> None:
    mine = columns(2, advantages=double(2.0, -1.0), old_log_probs=double(-1.0, -1.0), ref_log_probs=double(-1.5, -1.0))
    given = double(-1.0, -1.0), double(1.0, 2.0)
    beside = policy_objective(
        *given, mine | {"policy_weight": double(0.0, 0.0)}, Linear(), Objective(LossChoice("mine")), 0.01, 0.1
    )[0].item()
    plain = policy_objective(*given, mine, Linear(), Objective(LossChoice("mine")), 0.01, 0.1)[0].item()
    weighted, sums = policy_objective(
        *given, mine | {"policy_weight": double(0.5, 3.0)}, Linear(), Objective(LossChoice("mine")), 0.01, 0.1
    )
    assert plain - beside == pytest.approx(-2.0 + 1.0)
    assert weighted.item() - beside == pytest.approx(0.5 * -2.0 + 3.0 * 1.0)
    assert float(sums["policy/mine"][0]) == 1.0


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        (
            lambda lp: (lp.mean(), {}),
            r"the policy loss 'mine' returned a loss of shape \[\] for 2 response tokens. Fix: .*\[R\]",
        ),
        (
            lambda lp: (lp, {"clip_frac": lp.mean()}),
            r"the policy loss 'mine' returned 'clip_frac' of shape \[\] for 2 response tokens. Fix: .*\[R\]",
        ),
        (lambda lp: lp, "the policy loss 'mine' returned a Tensor. Fix: "),
    ],
)
def test_a_loss_that_is_not_one_value_a_token_is_reported_and_not_broadcast(mistake: Any, expected: str) -> None:
    class Mistaken(Linear):
        def loss(self, view: LossView) -> tuple[Tensor, Mapping[str, Tensor]]:
            return mistake(view.log_probs)  # type: ignore[no-any-return]

    with pytest.raises(PluginError, match=expected):
        policy_objective(double(-1.0, -2.0), None, columns(2), Mistaken(), Objective(LossChoice("mine")))


def test_a_kl_term_without_a_reference_is_reported() -> None:
    with pytest.raises(TrainerError, match="ref_log_probs"):
        policy_objective(double(-1.0), None, columns(1), Linear(), Objective(LossChoice("mine")), kl_coef=0.1)


def test_tokens_of_weight_zero_count_nowhere_even_if_not_finite() -> None:
    sums = metric_sums({"x": double(1.0, float("inf"))}, double(2.0, 0.0))
    assert tuple(map(float, sums["x"])) == (2.0, 2.0)


def test_the_value_loss_is_half_the_larger_square_of_the_clipped_and_the_plain_error() -> None:
    mine = columns(3, coef=double(1.0, 1.0, 0.5), returns=double(1.0, 1.0, 0.0), values=double(0.0, 0.0, 0.0))
    values = double(0.9, 0.1, 0.2).requires_grad_()
    assert value_objective(values, mine, None)[0].item() == pytest.approx(0.5 * (0.01 + 0.81 + 0.5 * 0.04))
    clipped, sums = value_objective(
        values, mine, 0.15
    )  # the first value is clipped to .15, the third to .15 with the smaller error
    assert clipped.item() == pytest.approx(0.5 * (0.85**2 + 0.81 + 0.5 * 0.04))
    clipped.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -0.9, 0.1])
    assert float(sums["critic/value/mean"][0]) == pytest.approx(1.2)


def test_the_loss_is_built_by_name_from_the_installed_plugins() -> None:
    assert type(build_loss(Objective(LossChoice("ppo")))).__name__ == "PpoLoss"
    with pytest.raises(PluginError, match=r"no policy loss is named 'pppo'. Did you mean 'ppo'"):
        build_loss(Objective(LossChoice("pppo")))


def gradient(folder: Path, update: Update, objective: Objective, size: int, budget: int | None, chunk: int) -> Tensor:
    """The objective's gradient in fp64, summed over micro-batches."""
    model = models.load_causal_lm(folder, "fp64", "sdpa")
    loss, layout, chosen = build_loss(objective), Layout(update.rows), objective_columns(update)
    for samples in layout.cut(size, budget):
        batch = layout.micro_batch(samples, torch.device("cpu"))
        log_probs, entropy = token_log_probs(model, batch, 0.7, chunk=chunk, entropy=True, entropy_gradient=True)
        tensors = column_tensors(chosen, batch.responses, log_probs)
        policy_objective(log_probs, entropy, tensors, loss, objective, update.entropy_coef, update.kl_coef)[
            0
        ].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("ratio_type", ["token", "segment"])
def test_in_fp64_the_gradient_depends_on_no_cutting_padding_order_or_chunk(
    folder: Path, update: Update, ratio_type: Any
) -> None:
    objective = Objective(LossChoice("ppo"), ratio_type=ratio_type)
    whole = gradient(folder, update, objective, 100, None, 0)
    assert whole.norm() > 1e-3
    order = np.random.default_rng(1).permutation(len(update.rows))
    shuffled = Update(update.rows.select(order), update.lr, update.entropy_coef, update.kl_coef)
    for other in (
        gradient(folder, update, objective, 1, None, 3),
        gradient(folder, update, objective, 4, None, 0),
        gradient(folder, shuffled, objective, 3, None, 5),
        gradient(folder, shuffled, objective, 1, 37, 0),
    ):
        assert float((other - whole).norm() / whole.norm()) <= 1e-10


def test_a_row_and_its_halved_copy_give_the_gradient_of_the_row(folder: Path, update: Update) -> None:
    rows = update.rows
    twice = rows.select(np.concatenate([np.arange(len(rows)), np.arange(len(rows))]))
    twice = Rows(
        twice.input_ids, twice.offsets, twice.response_mask, {**twice.columns, "coef": twice.columns["coef"] / 2}
    )
    objective = Objective(LossChoice("ppo"), ratio_type="segment")
    whole = gradient(folder, update, objective, 100, None, 0)
    copied = gradient(folder, Update(twice, update.lr, update.entropy_coef, update.kl_coef), objective, 5, None, 0)
    assert float((copied - whole).norm() / whole.norm()) <= 1e-10
