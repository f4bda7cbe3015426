"""What every policy loss keeps: one value per token, gradient through the new log-probs alone, no order, no
infinity."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.contracts.loss import LossCapabilities, LossContext, LossView
from turnwise.testing.subject import Subject

KIND = "policy_loss"
LENGTHS = (3, 1, 5, 4)
EXTRAS = ("scores", "trajectory_advantages")
EXTREME_LOG_PROB, EXTREME_ADVANTAGE, CLAMP = 50.0, 1e3, 20.0


@pytest.fixture
def torch() -> Any:
    """torch, or a skip."""
    return pytest.importorskip("torch")


def build(implementation: Subject) -> Any:
    return implementation.build(implementation.supplied.get("context", LossContext()))


def random_columns(torch: Any, size: float = 1.0, advantage: float = 1.0) -> dict[str, Any]:
    """Float64 columns [R] of four samples; log-probs up to −4·`size`."""
    draw = torch.Generator().manual_seed(0)
    count = sum(LENGTHS)

    def uniform(low: float, high: float) -> Any:
        return low + (high - low) * torch.rand(count, generator=draw, dtype=torch.float64)

    old = uniform(-4 * size, -0.01)
    columns = {
        "log_probs": (old + uniform(-0.4, 0.4) * size).clamp(max=-1e-3),
        "old_log_probs": old,
        "infer_log_probs": (old + uniform(-0.1, 0.1) * size).clamp(max=-1e-3),
        "ref_log_probs": uniform(-4 * size, -0.01),
        "entropy": uniform(0.1, 2.0),
        "advantages": uniform(-advantage, advantage),
        "coef": torch.full((count,), 1 / count, dtype=torch.float64),
    }
    sample = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    trajectory = sample // 2
    total = torch.zeros(2, dtype=torch.float64).index_add(0, trajectory, columns["advantages"])
    extras = {"scores": trajectory.double(), "trajectory_advantages": (total / torch.bincount(trajectory))[trajectory]}
    return columns | {"sample": sample, "turn": sample, "trajectory": trajectory} | extras


def view(columns: dict[str, Any]) -> LossView:
    """The view of some columns; the ratio is taken per token."""
    extras = {name: columns[name] for name in EXTRAS}
    known = {name: column for name, column in columns.items() if name not in EXTRAS}
    ratio = (columns["log_probs"] - columns["old_log_probs"]).clamp(-CLAMP, CLAMP)
    return LossView(log_ratio=ratio, extras=extras, **known)


def test_shape_and_metrics(implementation: Subject, torch: Any) -> None:
    policy_loss = build(implementation)
    assert isinstance(implementation.capabilities(LossCapabilities), LossCapabilities)
    columns = random_columns(torch)
    columns["log_probs"].requires_grad_()
    loss, metrics = policy_loss.loss(view(columns))
    assert loss.shape == (sum(LENGTHS),), (
        f"the loss has the shape {tuple(loss.shape)}; one value per token is ({sum(LENGTHS)},)."
    )
    assert torch.isfinite(loss).all()
    for name, values in metrics.items():
        assert values.shape == loss.shape, (
            f"metric {name!r} has the shape {tuple(values.shape)}; it must have one value per token."
        )
        assert not values.requires_grad, f"metric {name!r} carries a gradient. Fix: detach it."


def test_gradient_flows_through_the_new_log_probs_alone(implementation: Subject, torch: Any) -> None:
    columns = random_columns(torch)
    before = {name: column.clone() for name, column in columns.items()}
    # The rest is data in training.
    tracked = {name: columns[name].requires_grad_() for name in ("log_probs", "entropy")}
    loss, _ = build(implementation).loss(view(columns))
    assert loss.requires_grad, "the loss carries no gradient. Fix: compute it from view.log_probs or view.log_ratio."
    through, beside = torch.autograd.grad(loss.sum(), list(tracked.values()), allow_unused=True)
    assert through is not None, "no gradient reaches the new log-probs."
    assert (through != 0).any(), "no gradient reaches the new log-probs."
    assert beside is None or not beside.any(), (
        "a gradient flows through the entropy. Fix: detach it; its bonus is the objective's own term."
    )
    assert all(torch.equal(before[name], column) for name, column in columns.items()), (
        "loss changed a column of the view in place."
    )


def test_the_order_of_the_samples_does_not_matter(implementation: Subject, torch: Any) -> None:
    columns = random_columns(torch)
    starts = torch.cumsum(torch.tensor((0, *LENGTHS)), 0)
    # Whole samples are moved: the tokens of one stay together, as in every micro-batch.
    order = torch.cat([torch.arange(int(starts[s]), int(starts[s + 1])) for s in (2, 0, 3, 1)])
    policy_loss = build(implementation)
    plain, _ = policy_loss.loss(view(columns))
    moved, _ = policy_loss.loss(view({name: column[order] for name, column in columns.items()}))
    torch.testing.assert_close(moved, plain[order], msg="the loss of a token changes with the order of the samples.")


def test_it_is_finite_at_extremes(implementation: Subject, torch: Any) -> None:
    columns = {
        name: c.float() if c.is_floating_point() else c
        for name, c in random_columns(torch, EXTREME_LOG_PROB / 4, EXTREME_ADVANTAGE).items()
    }
    # Both ends of the clamp: a token that the new policy all but excludes, and one that the old one did.
    ends = torch.tensor([-EXTREME_LOG_PROB, -1e-6])
    columns["log_probs"][:2], columns["old_log_probs"][:2] = ends, ends.flip(0)
    columns["log_probs"][2:4] = columns["old_log_probs"][2:4]  # a ratio of exactly one
    columns["advantages"][4] = 0.0
    columns["log_probs"].requires_grad_()
    loss, metrics = build(implementation).loss(view(columns))
    (gradient,) = torch.autograd.grad(loss.sum(), columns["log_probs"])
    assert torch.isfinite(loss).all(), (
        "the loss is not finite at log-ratios of ±20. Fix: use view.log_ratio, which is clamped."
    )
    assert torch.isfinite(gradient).all(), "the gradient is not finite at log-ratios of ±20."
    assert all(torch.isfinite(values.float()).all() for values in metrics.values()), (
        "a metric is not finite at log-ratios of ±20."
    )
