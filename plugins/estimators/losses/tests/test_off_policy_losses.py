"""The off-policy losses: reference values, gradients by hand, and what no arrangement of rows may change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from turnwise.contracts.loss import LossContext, LossView
from turnwise.errors import TrainerError
from turnwise.plugins import Registry
from turnwise_losses import config as options

NAMES = ("ppo", "vanilla", "tis", "topr", "cispo", "kimi15", "gspo", "gmpo", "sapo", "dppo")
REGISTRY = Registry.discover()


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def view(log_probs: Tensor, old: Tensor, advantages: Tensor, **columns: Any) -> LossView:
    """Tokens of one segment of one row, unless `columns` say otherwise; the sampler's log-probs are the old ones, the
    ratio is per token."""
    zeros = torch.zeros(len(log_probs), dtype=torch.int64)
    extras: dict[str, Any] = {
        name: columns.pop(name) for name in ("scores", "trajectory_advantages") if name in columns
    }
    base: dict[str, Any] = {
        "sample": zeros,
        "turn": zeros,
        "trajectory": zeros,
        "infer_log_probs": old,
        "coef": torch.ones_like(old),
    }
    ratio = (log_probs - old).clamp(-20, 20)
    everything = base | columns
    return LossView(
        log_probs=log_probs, old_log_probs=old, advantages=advantages, log_ratio=ratio, extras=extras, **everything
    )


def build(name: str, **given: Any) -> Any:
    entry = REGISTRY.find("policy_loss", name)
    config_class: Any = entry.config_class()
    return REGISTRY.build("policy_loss", name, config_class(**given), LossContext())


def one(name: str, p: float, q: float, advantage: float, **given: Any) -> tuple[float, float, dict[str, float]]:
    """(loss, its gradient by the new log-prob, metrics) of one token whose probability went from `q` to `p`."""
    log_probs = double(math.log(p)).requires_grad_()
    shown = {"scores": double(advantage), "trajectory_advantages": double(advantage)}
    loss, metrics = build(name, **given).loss(view(log_probs, double(math.log(q)), double(advantage), **shown))
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return loss.item(), gradient.item(), {key: float(x) for key, x in metrics.items()}


@pytest.mark.parametrize(
    ("name", "given", "loss", "gradient", "clipped"),
    [
        ("kimi15", {}, -1.7977391, 1.5 + 0.1 * math.log(1.5), None),
        ("tis", {}, -1.8059592, 1.5, 1.0),
        ("cispo", {"cispo_epsilon_low": 0.1, "cispo_epsilon_high": 0.1}, -1.9865551, 1.65, 1.0),
        ("cispo", {}, -2.7089388, 2.25, 0.0),
        ("tis", {"tis_upper_bound": 2.0}, 1.5 * 1.5 * math.log(0.3), 2.25, 0.0),
        ("topr", {}, -1.8059592, 1.5, 1.0),
        ("topr", {"topr_weight_neg": 0.5}, -1.8059592 / 2, 0.75, 1.0),
    ],
)
def test_the_reference_token(
    name: str, given: dict[str, Any], loss: float, gradient: float, clipped: float | None
) -> None:
    """lp = ln .3, lp_old = ln .2, A = −1.5: the ratio is 1.5, and constant in every one of these."""
    got = one(name, 0.3, 0.2, -1.5, **given)
    assert got[:2] == (pytest.approx(loss, abs=1e-6), pytest.approx(gradient, abs=1e-9))
    assert got[2].get("clip_frac") == clipped


def test_a_lower_bound_lifts_small_ratios() -> None:
    assert one("tis", 0.1, 0.5, 1.0)[1] == pytest.approx(-0.2)
    assert one("tis", 0.1, 0.5, 1.0, tis_lower_bound=0.5)[1:] == (pytest.approx(-0.5), {"clip_frac": 1.0})
    assert one("cispo", 0.1, 0.5, 1.0)[1] == pytest.approx(-0.2)  # ε_low 1 binds nowhere
    assert one("cispo", 0.1, 0.5, 1.0, cispo_epsilon_low=0.5)[1] == pytest.approx(-0.5)


def test_topr_leaves_positive_trajectories_unweighted_and_truncates_the_ratio_of_negative_ones() -> None:
    log_probs = double(*[math.log(0.4)] * 4).requires_grad_()
    old = double(*[math.log(p) for p in (0.1, 0.1, 0.8, 0.8)])
    tokens = view(
        log_probs, old, double(1, -1, 1, -1), trajectory_advantages=double(0, 0, -0.5, -0.5), scores=double(0, 0, 1, 1)
    )
    loss, metrics = build("topr", topr_weight_pos=2.0, topr_weight_neg=3.0).loss(tokens)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert gradient.tolist() == pytest.approx([-2.0, 2.0, -1.5, 1.5])  # a mean of exactly 0 is positive
    assert metrics["topr_positive_frac"].tolist() == [1, 1, 0, 0]
    assert metrics["clip_frac"].tolist() == [0, 0, 0, 0]
    loss, metrics = build("topr", topr_sign="score").loss(tokens)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert gradient.tolist() == pytest.approx(
        [-1.0, 1.0, -1.0, 1.0]
    )  # a score of exactly 0 is negative; its ratio 4 is cut to 1
    assert metrics["clip_frac"].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gspo_has_one_ratio_per_turn_and_each_tokens_own_gradient(sign: float) -> None:
    log_probs = double(0.1, -0.04, 0.06, 0.2).requires_grad_()
    tokens = view(log_probs, double(0, 0, 0, 0), double(*[-sign] * 3, 0.0), turn=torch.tensor([5, 5, 5, 7]))
    loss, metrics = build("gspo", gspo_clip_low=0.5, gspo_clip_high=0.5).loss(tokens)
    assert loss.tolist() == pytest.approx([sign * 1.0408108] * 3 + [0.0], abs=1e-6)
    (gradient,) = torch.autograd.grad((loss * double(1, 2, 4, 8)).sum(), log_probs)
    assert gradient.tolist() == pytest.approx([sign * 1.0408108 * w for w in (1, 2, 4)] + [0.0], abs=1e-5)
    assert metrics["clip_frac"].tolist() == [0, 0, 0, 0]
    loss, metrics = build("gspo").loss(tokens)  # 1.04 is over 1.0004: bounded where A is positive
    assert loss.tolist() == pytest.approx([1.0408108 if sign > 0 else -1.0004] * 3 + [0.0], abs=1e-6)
    assert metrics["clip_frac"].tolist() == [float(sign < 0)] * 3 + [0]


def test_gspo_level_sample_takes_the_row() -> None:
    log_probs, zero = double(0.1, 0.3, 0.5), double(0, 0, 0)
    rows = {"turn": torch.tensor([0, 1, 2]), "sample": torch.tensor([0, 0, 1])}
    wide = {"gspo_clip_low": 0.9, "gspo_clip_high": 0.9}
    by_turn = build("gspo", **wide).loss(view(log_probs, zero, double(1, 1, 1), **rows))[0]
    by_row = build("gspo", **wide, gspo_level="sample").loss(view(log_probs, zero, double(1, 1, 1), **rows))[0]
    assert by_turn.tolist() == pytest.approx([-math.exp(x) for x in (0.1, 0.3, 0.5)])
    assert by_row.tolist() == pytest.approx([-math.exp(x) for x in (0.2, 0.2, 0.5)])


@pytest.mark.parametrize(
    ("advantage", "loss", "open_tokens", "clipped"),
    [(1.0, -1.0, [0, 1, 1], [1, 0, 0]), (-1.0, 1.1051709, [1, 0, 1], [0, 1, 0])],
)
def test_gmpo_is_the_geometric_mean_of_bounded_ratios(
    advantage: float, loss: float, open_tokens: list[int], clipped: list[float]
) -> None:
    log_probs = double(0.6, -0.5, 0.1).requires_grad_()
    got, metrics = build("gmpo").loss(view(log_probs, double(0, 0, 0), double(*[advantage] * 3)))
    assert got.tolist() == pytest.approx([loss] * 3, abs=1e-6)
    (gradient,) = torch.autograd.grad(
        got.sum(), log_probs
    )  # three tokens carry the loss, a third of each runs through every open one
    assert gradient.tolist() == pytest.approx([loss * x for x in open_tokens], abs=1e-6)
    assert metrics["clip_frac"].tolist() == clipped


def test_gmpo_takes_the_mean_advantage_of_each_turn() -> None:
    tokens = view(
        double(0.2, 0.2, 0.3),
        double(0, 0, 0),
        double(2, 4, -1),
        turn=torch.tensor([0, 0, 1]),
        trajectory=torch.tensor([0, 0, 0]),
    )
    loss, _ = build("gmpo").loss(tokens)
    assert loss.tolist() == pytest.approx([-3 * math.exp(0.2)] * 2 + [math.exp(0.3)])


def test_sapo_values_and_its_gradient_at_ratio_one() -> None:
    assert one("sapo", 0.3, 0.2, -1.5)[0] == pytest.approx(3.5903782, abs=1e-6)
    assert one("sapo", 0.3, 0.2, 1.5)[0] == pytest.approx(-3.7347560, abs=1e-6)
    for advantage in (1.5, -1.5):
        assert one("sapo", 0.3, 0.3, advantage)[1] == pytest.approx(-advantage)


@pytest.mark.parametrize(
    ("mask", "p", "advantage", "loss"),
    [
        ("binary_tv", 0.5, 1.0, 0.0),
        ("binary_tv", 0.3, 1.0, -1.5),
        ("binary_kl", 0.5, 1.0, 0.0),
        ("binary_kl", 0.3, 1.0, -1.5),
        ("binary_tv", 0.5, -1.0, 2.5),  # moved against A: never masked
        ("binary_kl", 0.5, -1.0, 2.5),
        ("binary_kl", 0.01, -1.0, 0.0),  # D = .43
        ("binary_tv", 0.01, -1.0, 0.05),  # |p − q| = .19
    ],
)
def test_dppo_masks_what_left_the_trust_region_with_the_advantage(
    mask: str, p: float, advantage: float, loss: float
) -> None:
    got = one("dppo", p, 0.2, advantage, dppo_mask=mask)
    assert got[:2] == (pytest.approx(loss, abs=1e-9), pytest.approx(loss, abs=1e-9))  # d(p/q)/d lp = p/q
    assert got[2] == {"clip_frac": float(loss == 0)}


@pytest.mark.parametrize(("p", "divergence"), [(0.5, 0.1927448), (0.3, 0.0257321)])
def test_the_binary_divergence_of_dppo(p: float, divergence: float) -> None:
    assert one("dppo", p, 0.2, 1.0, dppo_mask="binary_kl", dppo_delta=divergence - 1e-6)[0] == 0.0
    assert one("dppo", p, 0.2, 1.0, dppo_mask="binary_kl", dppo_delta=divergence + 1e-6)[0] == pytest.approx(-p / 0.2)


def test_dppo_reads_the_sampler_and_not_the_old_policy() -> None:
    log_probs, sampler = double(math.log(0.3)), double(math.log(0.2))
    loss, _ = build("dppo").loss(view(log_probs, double(-9.0), double(1.0), infer_log_probs=sampler))
    assert loss.item() == pytest.approx(-1.5)
    with pytest.raises(TrainerError, match="'dppo' needs the sampler's log-probs"):
        build("dppo").loss(view(log_probs, sampler, double(1.0), infer_log_probs=None))


def test_losses_with_a_constant_ratio_follow_the_level_that_was_chosen() -> None:
    log_probs, old, advantages = double(-1.0, -2.0), double(-1.2, -1.8), double(1.0, 1.0)
    level = double(-0.1, -0.1)
    index = torch.zeros(2, dtype=torch.int64)
    extras = {"trajectory_advantages": double(-1, -1)}
    tokens = LossView(log_probs, old, advantages, torch.ones(2), level, index, index, index, extras=extras)
    for name in ("tis", "topr", "cispo"):
        assert build(name).loss(tokens)[0].tolist() == pytest.approx([math.exp(-0.1), 2 * math.exp(-0.1)]), name


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(data=st.data())
def test_the_order_and_the_cutting_of_rows_change_no_tokens_loss_or_gradient(name: str, data: st.DataObject) -> None:
    """Rows in any order, and any part of them alone (a micro-batch), give the same."""
    number = st.floats(-3, 3, allow_nan=False, width=32)
    segments = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    count = sum(segments)

    def drawn() -> Tensor:
        return torch.tensor(data.draw(st.lists(number, min_size=count, max_size=count)), dtype=torch.float64)

    row = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(segments))
    log_probs, old, advantages, trajectory_advantages = -drawn().abs() - 0.01, -drawn().abs() - 0.01, drawn(), drawn()
    places = {
        "sample": row,
        "turn": row + 3,
        "trajectory": row // 2,
        "trajectory_advantages": trajectory_advantages[row // 2],
    }
    order = torch.tensor(data.draw(st.permutations(range(len(segments)))))
    cut = data.draw(st.integers(0, len(segments)))
    loss = build(name)

    def result(chosen: Tensor) -> tuple[Tensor, Tensor]:
        lp = log_probs[chosen].requires_grad_()
        per_token, _ = loss.loss(
            view(lp, old[chosen], advantages[chosen], **{key: x[chosen] for key, x in places.items()})
        )
        assert per_token.dtype == torch.float64
        return per_token.detach(), torch.autograd.grad(per_token.sum(), lp)[0] if len(chosen) else torch.zeros(0)

    whole, slope = result(torch.arange(count))
    for part in (order[:cut], order[cut:]):
        chosen = (
            torch.cat([(row == r).nonzero().squeeze(-1) for r in part])
            if len(part)
            else torch.zeros(0, dtype=torch.int64)
        )
        if not len(chosen):
            continue
        torch.testing.assert_close(result(chosen)[0], whole[chosen], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result(chosen)[1], slope[chosen], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50)
@given(
    tokens=st.lists(
        st.tuples(
            st.floats(-80, 0, width=32),
            st.floats(-80, 0, width=32),
            st.sampled_from([-1e4, -1.0, -1e-8, 0.0, 1e-8, 1.0, 1e4]),
        ),
        min_size=1,
        max_size=6,
    ),
    kind=st.sampled_from([torch.float32, torch.float64]),
)
def test_every_loss_is_finite_at_extremes_with_a_gradient_for_the_new_log_probs_alone(
    name: str, tokens: list[tuple[float, float, float]], kind: torch.dtype
) -> None:
    log_probs, old, advantages = (torch.tensor(column, dtype=kind) for column in zip(*tokens))
    log_probs.requires_grad_()
    shown = {"trajectory_advantages": advantages.mean().expand(len(tokens))}
    for given_options in ({}, {"dppo_mask": "binary_kl"}) if name == "dppo" else ({},):
        loss, metrics = build(name, **given_options).loss(view(log_probs, old, advantages, **shown))
        (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()
        assert loss.dtype == kind
        assert all(torch.isfinite(x).all() and not x.requires_grad and x.shape == loss.shape for x in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_at_the_sampling_policy_every_gradient_is_the_policy_gradients(name: str) -> None:
    log_probs = double(-0.5, -1.0, -2.0).requires_grad_()
    advantages = double(0.7, 0.7, 0.7)
    loss, _ = build(name).loss(view(log_probs, log_probs.detach(), advantages, trajectory_advantages=advantages))
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    torch.testing.assert_close(gradient, -advantages)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: options.TisConfig(tis_lower_bound=2.0), "tis_lower_bound 2.0 is above tis_upper_bound 1.0"),
        (lambda: options.TisConfig(tis_upper_bound=0.0), "tis_upper_bound must be positive, got 0.0"),
        (lambda: options.ToprConfig(topr_weight_neg=-1.0), "topr_weight_neg must not be negative, got -1.0"),
        (lambda: options.CispoConfig(cispo_epsilon_low=-0.1), "cispo_epsilon_low must not be negative"),
        (lambda: options.GspoConfig(gspo_clip_high=0.0), "gspo_clip_high must be positive"),
        (lambda: options.GmpoConfig(gmpo_clip=0.0), "gmpo_clip must be positive"),
        (lambda: options.SapoConfig(sapo_tau_neg=0.0), "sapo_tau_neg must be positive"),
        (lambda: options.DppoConfig(dppo_delta=0.0), "dppo_delta must be positive"),
    ],
)
def test_impossible_options_of_the_off_policy_losses_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
