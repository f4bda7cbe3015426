"""What every policy loss keeps: one value per token, of which the other samples know nothing, a gradient that raises
what has a positive advantage and flows through the new log-probs alone, no infinity; and what it declares is true."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.contracts.loss import LossCapabilities, LossContext, LossView
from turnwise.testing.subject import Subject

KIND = "policy_loss"
# One of a single token, whose turn's mean is its own value.
LENGTHS = (3, 1, 5, 4)
EXTRAS = ("scores", "trajectory_advantages")
EXTREME_LOG_PROB, EXTREME_ADVANTAGE, CLAMP = 50.0, 1e3, 20.0
OPTIONAL = ("infer_log_probs", "ref_log_probs", "entropy")
"""Columns that a run may not have: each is then None."""


@pytest.fixture
def torch() -> Any:
    """torch, or a skip."""
    return pytest.importorskip("torch")


def build(implementation: Subject) -> Any:
    """The loss with its context, or the default one."""
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
    # Two samples a trajectory: what is of the trajectory must not be taken of the row.
    trajectory = sample // 2
    total = torch.zeros(2, dtype=torch.float64).index_add(0, trajectory, columns["advantages"])
    extras = {"scores": trajectory.double(), "trajectory_advantages": (total / torch.bincount(trajectory))[trajectory]}
    return columns | {"sample": sample, "turn": sample, "trajectory": trajectory} | extras


def view(columns: dict[str, Any], segments: bool = False) -> LossView:
    """The view of some columns; the ratio is taken per token, or with `segments` over each sample, which is a turn."""
    extras = {name: columns[name] for name in EXTRAS}
    known = {name: column for name, column in columns.items() if name not in EXTRAS}
    new, sample = columns["log_probs"], columns["sample"]
    ratio = (new - columns["old_log_probs"]).clamp(-CLAMP, CLAMP)
    if segments:
        count = sample.bincount()
        mean = new.new_zeros(len(count)).index_add(0, sample, ratio.detach()) / count
        ratio = mean[sample] + new - new.detach()
    return LossView(log_ratio=ratio, extras=extras, **known)


def on_policy(torch: Any, advantage: float) -> dict[str, Any]:
    """Columns of which all tokens have the same: one policy, one log-prob, one advantage."""
    columns = random_columns(torch)
    level = {"log_probs": -0.7, "old_log_probs": -0.7, "infer_log_probs": -0.7, "ref_log_probs": -0.7, "entropy": 1.0}
    level |= {"advantages": advantage, "trajectory_advantages": advantage, "scores": advantage}
    return columns | {name: torch.full_like(columns["coef"], value) for name, value in level.items()}


def gradient(torch: Any, policy_loss: Any, columns: dict[str, Any], segments: bool = False) -> tuple[Any, Any]:
    """(loss [R], gradient [R] of its sum with respect to the new log-probs); zero where none flows."""
    tracked = columns["log_probs"].clone().requires_grad_()
    loss, _ = policy_loss.loss(view(columns | {"log_probs": tracked}, segments))
    (flows,) = torch.autograd.grad(loss.sum(), tracked, allow_unused=True)
    return loss.detach(), torch.zeros_like(tracked) if flows is None else flows


def test_shape_and_metrics(implementation: Subject, torch: Any) -> None:
    """A loss per token, metrics without a gradient."""
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
    """All other columns are data."""
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
    """Rows are dealt to ranks at will."""
    columns = random_columns(torch)
    starts = torch.cumsum(torch.tensor((0, *LENGTHS)), 0)
    # Whole samples are moved: the tokens of one stay together, as in every micro-batch.
    order = torch.cat([torch.arange(int(starts[s]), int(starts[s + 1])) for s in (2, 0, 3, 1)])
    policy_loss = build(implementation)
    plain, _ = policy_loss.loss(view(columns))
    moved, _ = policy_loss.loss(view({name: column[order] for name, column in columns.items()}))
    torch.testing.assert_close(moved, plain[order], msg="the loss of a token changes with the order of the samples.")


def test_the_other_samples_of_the_view_do_not_matter(implementation: Subject, torch: Any) -> None:
    """Micro-batches cut an update anywhere."""
    policy_loss, columns = build(implementation), random_columns(torch)
    loss, flows = gradient(torch, policy_loss, columns)
    for sample in range(len(LENGTHS)):
        mine = columns["sample"] == sample
        alone = gradient(torch, policy_loss, {name: column[mine] for name, column in columns.items()})
        for own, among in zip(alone, (loss[mine], flows[mine])):
            message = (
                "the loss of a token, or its gradient, changes with the samples beside it: training would depend on how"
                " an update is cut into micro-batches. Fix: no mean, sum or rank over the view; what needs the whole"
                " batch belongs into the advantages."
            )
            torch.testing.assert_close(own, among, msg=message)


def test_every_token_is_pushed_where_its_advantage_says(implementation: Subject, torch: Any) -> None:
    """Up where it is positive, down where it is negative."""
    policy_loss = build(implementation)
    # The difference between good and bad, so that terms without the advantage (a KL) and one-sided losses are fine.
    good, bad = (gradient(torch, policy_loss, on_policy(torch, advantage))[1] for advantage in (1.0, -1.0))
    assert not (good > bad).any(), (
        "a higher advantage lowers the log-prob of its token. Fix: the sign; the loss is minimised, so it falls with"
        " advantage times log-prob."
    )
    still = int((good == bad).sum())
    assert not still, (
        f"{still} of {len(good)} tokens get no gradient from their advantage, at a ratio of one. Fix: leave no token of"
        " the view out; what is masked is not in it."
    )


def test_what_it_declares_of_the_ratio_is_true(implementation: Subject, torch: Any) -> None:
    """By which old log-probs are computed or left out."""
    policy_loss, columns = build(implementation), random_columns(torch)
    declares = implementation.capabilities(LossCapabilities)
    plain = gradient(torch, policy_loss, columns)[1]

    def turns(segments: bool = False, **others: Any) -> bool:
        return not torch.allclose(plain, gradient(torch, policy_loss, columns | others, segments)[1])

    old = columns["old_log_probs"] + torch.linspace(-0.3, 0.3, sum(LENGTHS), dtype=torch.float64)
    if not declares.uses_ratio:
        assert not turns(old_log_probs=old), (
            "it declares uses_ratio=False, and old log-probs change its gradient. Fix: LossCapabilities() without it."
        )
        return
    assert turns(old_log_probs=old, infer_log_probs=columns["infer_log_probs"].flip(0)), (
        "no old policy changes its gradient: several updates a step are off-policy without correction, and nobody is"
        " warned. Fix: LossCapabilities(uses_ratio=False)."
    )
    given = turns(segments=True)
    assert given or declares.own_ratio, (
        "view.log_ratio does not change its gradient: ratio_type has no effect, and nobody is warned. Fix: use"
        " view.log_ratio, or LossCapabilities(own_ratio=True)."
    )
    assert not (given and declares.own_ratio), (
        "it declares own_ratio, and view.log_ratio changes its gradient. Fix: LossCapabilities() without it."
    )


def test_it_needs_no_column_that_it_does_not_declare(implementation: Subject, torch: Any) -> None:
    """One that is not asked for may be missing."""
    policy_loss, columns = build(implementation), random_columns(torch)
    declares = implementation.capabilities(LossCapabilities)
    _, metrics = policy_loss.loss(view(columns))
    assert not declares.clips or "clip_frac" in metrics, "it declares clips, and has no metric 'clip_frac'."
    for name in OPTIONAL:
        if name == "infer_log_probs" and declares.needs_infer_log_probs:
            continue
        try:
            policy_loss.loss(view(columns | {name: None}))
        except Exception as error:
            raise AssertionError(
                f"loss fails where view.{name} is None, as in a run without it: {error!r}. Fix: take it if it is there;"
                " LossCapabilities(needs_infer_log_probs=True) where the sampler's log-probs must be."
            ) from error


def test_it_is_finite_at_extremes(implementation: Subject, torch: Any) -> None:
    """For ratios that overflow an exponential."""
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
