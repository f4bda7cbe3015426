"""Policy losses against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from turnwise.contracts.loss import LossContext, LossView
from turnwise.plugins import Registry
from turnwise_losses.config import PpoConfig, VanillaConfig
from turnwise_losses.ppo import PpoLoss
from turnwise_losses.vanilla import VanillaLoss


def view(ratios: list[float], advantages: list[float]) -> LossView:
    """Tokens with these ratios and advantages; the old log-probs are −1."""
    log_probs = (torch.tensor(ratios, dtype=torch.float64).log() - 1).requires_grad_()
    old = torch.full_like(log_probs, -1.0).detach()
    index = torch.zeros(len(ratios), dtype=torch.int64)
    return LossView(
        log_probs=log_probs,
        old_log_probs=old,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        coef=torch.ones(len(ratios), dtype=torch.float64),
        log_ratio=log_probs - old,
        sample=index,
        turn=index,
        trajectory=index,
    )


def ppo(**options: Any) -> PpoLoss:
    return PpoLoss(PpoConfig(**options), LossContext())


@pytest.mark.parametrize(
    ("options", "ratio", "advantage", "expected"),
    [
        ({}, 1.5, -1.5, 2.25),
        ({"dual_clip_loss": True}, 1.5, -1.5, 2.1),  # c = 1.4
        ({"dual_clip_loss": True, "dual_clip_c": 3.0}, 3.5, -1.5, 4.5),
        ({}, 3.5, -1.5, 5.25),
        ({}, 1.5, 1.0, -1.2),  # the upper bound acts
        ({}, 0.5, 1.0, -0.5),  # a positive advantage is not bounded below
        ({}, 0.5, -1.0, 0.8),  # the lower bound acts
        ({"pg_clip_high": 0.28}, 1.5, 1.0, -1.28),
        ({"pg_clip_high": 0.28}, 0.5, -1.0, 0.8),
        ({"pg_clip_low": 0.1}, 0.5, -1.0, 0.9),
        ({"pg_clip_low": 0.1}, 1.5, 1.0, -1.2),
        ({"dual_clip_loss": True}, 3.0, 1.0, -1.2),  # the dual clip leaves positive advantages alone
    ],
)
def test_ppo_values(options: dict[str, Any], ratio: float, advantage: float, expected: float) -> None:
    loss, _ = ppo(**options).loss(view([ratio], [advantage]))
    assert loss.item() == pytest.approx(expected, abs=1e-9)


def test_ppo_gradient_is_zero_where_a_clip_acts_and_minus_ratio_times_advantage_elsewhere() -> None:
    tokens = view([1.5, 1.1, 0.5, 3.5], [1.0, 2.0, -1.0, -1.5])
    loss, _ = ppo(dual_clip_loss=True, dual_clip_c=3.0).loss(tokens)
    loss.sum().backward()
    torch.testing.assert_close(tokens.log_probs.grad, torch.tensor([0.0, -2.2, 0.0, 0.0], dtype=torch.float64))


def test_clip_frac_marks_the_tokens_whose_loss_a_clip_changed() -> None:
    tokens = view([1.5, 1.5, 1.1, 3.5, 1.0], [1.0, -1.0, 1.0, -1.0, 0.0])
    _, metrics = ppo(dual_clip_loss=True, dual_clip_c=3.0).loss(tokens)
    assert metrics["clip_frac"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert not metrics["clip_frac"].requires_grad


def test_vanilla_is_minus_advantage_times_log_prob() -> None:
    tokens = view([0.3, 2.0], [-1.5, 2.0])
    loss, metrics = VanillaLoss(None, LossContext()).loss(tokens)
    assert loss.tolist() == pytest.approx([1.5 * (math.log(0.3) - 1), -2.0 * (math.log(2.0) - 1)])
    loss.sum().backward()
    assert tokens.log_probs.grad.tolist() == [1.5, -2.0]
    assert metrics == {}


def test_only_ppo_uses_old_log_probs() -> None:
    assert PpoConfig().capabilities.uses_ratio
    assert not VanillaConfig().capabilities.uses_ratio


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pg_clip": 0.0}, "pg_clip must be positive, got 0.0"),
        ({"pg_clip_high": -0.1}, "pg_clip_high must be positive, got -0.1"),
        ({"dual_clip_c": 1.0}, "dual_clip_c must be greater than 1, got 1.0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PpoConfig(**options)


def test_the_losses_are_found_and_built_by_name() -> None:
    registry = Registry.discover()
    built = registry.build("policy_loss", "ppo", PpoConfig(pg_clip=0.1), LossContext())
    assert built.loss(view([1.5], [1.0]))[0].item() == pytest.approx(-1.1)
    assert isinstance(registry.build("policy_loss", "vanilla", None, LossContext()), VanillaLoss)
