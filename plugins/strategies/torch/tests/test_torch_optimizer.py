"""AdamW on master weights, against plain torch.optim.AdamW and against arithmetic in fp32."""

from __future__ import annotations

import torch
from torch import nn

from turnwise_torch.optimizer import MasterAdamW

BETAS, EPS = (0.9, 0.98), 1e-7


def named(*parameters: nn.Parameter) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]


def test_five_updates_in_fp32_are_those_of_plain_adamw_with_each_updates_rate() -> None:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))
    weight2, bias2 = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
    ours = MasterAdamW(named(weight, bias), BETAS, EPS, 0.1)
    plain = torch.optim.AdamW(
        [{"params": [weight2], "weight_decay": 0.1}, {"params": [bias2], "weight_decay": 0.0}],
        lr=1.0,
        betas=BETAS,
        eps=EPS,
    )
    for lr in (1e-2, 3e-3, 0.0, 1e-1, 5e-4):
        g, h = torch.randn(4, 3), torch.randn(3)
        weight.grad, bias.grad, weight2.grad, bias2.grad = g.clone(), h.clone(), g.clone(), h.clone()
        ours.accumulate()
        norm = ours.clip(1.0)
        assert norm == nn.utils.clip_grad_norm_([weight2, bias2], 1.0).item()
        ours.step(lr)
        for group in plain.param_groups:
            group["lr"] = lr
        plain.step()
        assert torch.equal(weight, weight2)
        assert torch.equal(bias, bias2)
    assert weight.grad is None


def test_a_bf16_parameter_follows_an_fp32_master() -> None:
    torch.manual_seed(0)
    start = torch.randn(4, 3)
    parameter = nn.Parameter(start.bfloat16())
    reference = nn.Parameter(start.clone())
    ours = MasterAdamW(named(parameter), BETAS, EPS, 0.0, masters={"p0": start})
    plain = torch.optim.AdamW([reference], lr=1.0, betas=BETAS, eps=EPS, weight_decay=0.0)
    for _ in range(20):
        parts = [torch.rand(4, 3).bfloat16() for _ in range(3)]
        for part in parts:
            parameter.grad = part.clone()
            ours.accumulate()
            assert parameter.grad is None
        reference.grad = (parts[0].float() + parts[1].float()) + parts[2].float()
        ours.step(1e-4)
        for group in plain.param_groups:
            group["lr"] = 1e-4
        plain.step()
        assert torch.equal(ours.masters["p0"], reference)
        assert torch.equal(parameter, reference.bfloat16())
    # Each step of 1e-4 is far below bf16's resolution at 1: without masters most parameters would never move.
    assert (ours.masters["p0"].detach() - start).abs().min() > 1e-3


def test_without_a_bound_nothing_is_clipped() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    ours = MasterAdamW(named(weight), BETAS, EPS, 0.0)
    weight.grad = torch.full((2, 2), 50.0)
    assert ours.clip(0.0) == 100.0
    assert (weight.grad == 50.0).all()


def test_frozen_parameters_are_left_out() -> None:
    frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    ours = MasterAdamW(named(nn.Parameter(torch.zeros(2, 2)), frozen), BETAS, EPS, 0.0)
    assert list(ours.masters) == ["p0"]


def test_moving_keeps_masters_and_moments() -> None:
    parameter = nn.Parameter(torch.ones(2, 2).bfloat16())
    ours = MasterAdamW(named(parameter), BETAS, EPS, 0.0)
    parameter.grad = torch.ones(2, 2).bfloat16()
    ours.accumulate()
    ours.step(0.1)
    before = {name: value.clone() for name, value in ours.state().items()}
    ours.move(torch.device("cpu"))
    assert set(before) == {"master/p0", "exp_avg/p0", "exp_avg_sq/p0", "step/p0"}
    assert all(torch.equal(value, before[name]) for name, value in ours.state().items())
