"""The objective Σ coef·(policy loss − entropy bonus + KL) over response tokens, and the value loss; every torch
strategy minimises this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.contracts.loss import LossContext, LossView, PolicyLoss
from turnwise.contracts.train import Objective
from turnwise.data.numbers import LOG_RATIO_BOUND
from turnwise.data.rows import Update
from turnwise.errors import PluginError, TrainerError, did_you_mean, listed
from turnwise.plugins import registry

KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "abs": lambda d: d.abs(),
    "k2": lambda d: d.square() / 2,
    # expm1 keeps the digits that exp(−d) − 1 loses where the two policies are close.
    "k3": lambda d: torch.expm1(-d) + d,
}
"""KL estimators as functions of d = log π − log π_ref (Schulman 2020, "Approximating KL divergence")."""
# verl's names for them.
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}

VIEW_COLUMNS = (
    "coef",
    "advantages",
    "old_log_probs",
    "infer_log_probs",
    "ref_log_probs",
    "sample",
    "turn",
    "trajectory",
)

Sums = dict[str, tuple[Tensor, Tensor]]


def build_loss(objective: Objective) -> PolicyLoss:
    """The policy loss that the objective names, from the installed plugins. Raises PluginError."""
    return registry().build(
        "policy_loss", objective.loss.name, objective.loss.config, LossContext(ratio_type=objective.ratio_type)
    )


def kl_estimator(name: str) -> Callable[[Tensor], Tensor]:
    """The function of log π − log π_ref that `kl_loss_type` names. Raises ValueError."""
    known = [*KL, *KL_ALIASES]
    if name not in known:
        raise ValueError(
            f"unknown KL estimator {name!r}.{did_you_mean(name, known)} Known: {listed(known)}. Fix: one of them"
        )
    return KL[KL_ALIASES.get(name, name)]


def token_kl(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """[R]: the estimator on log-ratios clamped to ±20; the result is not clamped."""
    return kl_estimator(estimator)((log_probs - ref_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, ratio_type: str, segment: Tensor) -> Tensor:
    """[R]: log_probs − old_log_probs clamped to ±20, per token, or with `segment` the mean over each segment.

    The mean carries no gradient; each token passes on the gradient of its own log-prob (GSPO's token form, arXiv
    2507.18071). `segment` int64 [R]: dense numbers from 0.
    """
    difference = (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if ratio_type == "token":
        return difference
    with torch.no_grad():
        count = torch.bincount(segment)
        total = torch.zeros(len(count), dtype=difference.dtype, device=difference.device).index_add_(
            0, segment, difference
        )
        mean = (total / count)[segment]
    return mean + log_probs - log_probs.detach()


def objective_columns(update: Update) -> dict[str, np.ndarray]:
    """The update's columns as the objective takes them: numbers only, and a column of sampler log-probs only if it is
    complete."""
    for name in ("coef", "weight"):
        if name not in update.rows.columns:
            raise TrainerError(f"an update needs the column {name!r}, it has: {listed(update.rows.columns)}")
    columns = {name: column for name, column in update.rows.columns.items() if column.dtype.kind in "biuf"}
    # NaN: the sampler gave none. With part of the column a loss would correct some tokens and not others.
    if "infer_log_probs" in columns and np.isnan(columns["infer_log_probs"]).any():
        del columns["infer_log_probs"]
    return columns


def column_tensors(columns: Mapping[str, np.ndarray], responses: np.ndarray, like: Tensor) -> dict[str, Tensor]:
    """The columns at `responses` on the device of `like`; floats in its dtype, integers as int64."""
    out = {}
    for name, column in columns.items():
        # torch has little arithmetic for unsigned integers.
        values = torch.from_numpy(
            np.ascontiguousarray(column[responses] if column.dtype.kind != "u" else column[responses].astype(np.int64))
        )
        kind = values.dtype
        wanted = like.dtype if kind.is_floating_point else kind if kind == torch.bool else torch.int64
        out[name] = values.to(like.device, wanted)
    return out


def loss_view(log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor], ratio_type: str) -> LossView:
    """What the policy loss sees: flat tensors [r] over the response tokens of whole samples; NaN old log-probs become
    the new ones."""
    old = columns.get("old_log_probs")
    fresh = log_probs.detach()
    # Nothing was recomputed where the weights have not moved since: the ratio is 1, and its gradient that of log π.
    old = fresh if old is None else torch.where(old.isnan(), fresh, old)
    # Turns are counted within their trajectory: only both numbers together name a segment.
    rows = torch.stack([columns["trajectory"], columns["turn"]])
    segment = torch.unique(rows, dim=1, return_inverse=True)[1] if ratio_type == "segment" else columns["turn"]
    return LossView(
        log_probs=log_probs,
        old_log_probs=old,
        advantages=columns["advantages"],
        coef=columns["coef"],
        log_ratio=log_ratio(log_probs, old, ratio_type, segment),
        sample=columns["sample"],
        turn=columns["turn"],
        trajectory=columns["trajectory"],
        infer_log_probs=columns.get("infer_log_probs"),
        ref_log_probs=columns.get("ref_log_probs"),
        entropy=entropy,
        extras={name: column for name, column in columns.items() if name not in VIEW_COLUMNS},
    )


def policy_objective(
    log_probs: Tensor,
    entropy: Tensor | None,
    columns: Mapping[str, Tensor],
    loss: PolicyLoss,
    objective: Objective,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Sums]:
    """(Σ coef·(policy_weight·loss − entropy_coef·entropy + kl_coef·kl), metric sums (Σ w·m·x, Σ w·m) by name), 0-dim
    tensors.

    `log_probs` [r] with gradient, `entropy` [r] or None; `columns` [r] hold coef, weight (w·m), advantages, sample,
    turn, trajectory and what else the batch carries; `policy_weight` is 1 where there is no such column. Sums are
    float64. Micro-batches and ranks add up: nothing here divides.
    """
    view = loss_view(log_probs, entropy, columns, objective.ratio_type)
    per_token, metrics = _checked(loss.loss(view), objective.loss.name, log_probs)
    # The train/infer correction weighs the policy's term alone; entropy and KL are of the current policy.
    if "policy_weight" in columns:
        per_token = columns["policy_weight"] * per_token
    with torch.no_grad():
        ratio = view.log_ratio.exp()
        # approx_kl is the k3 estimator of KL(old ‖ new): never negative, unlike the mean of −log ratio.
        shown = {"ratio_mean": ratio, "approx_kl": torch.expm1(view.log_ratio) - view.log_ratio, **metrics}
    if entropy is not None:
        shown["entropy"] = entropy.detach()
        if entropy_coef:
            per_token = per_token - entropy_coef * entropy
    if view.ref_log_probs is not None:
        kl = token_kl(log_probs, view.ref_log_probs, objective.kl_loss_type)
        shown["kl"] = kl.detach()
        if kl_coef:
            per_token = per_token + kl_coef * kl
    elif kl_coef:
        raise TrainerError(
            "a KL term in the loss needs the reference's log-probs (column 'ref_log_probs'), this update has none"
        )
    return (view.coef * per_token).sum(), metric_sums(
        {f"policy/{name}": x for name, x in shown.items()}, columns["weight"]
    )


def _checked(result: Any, name: str, log_probs: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """What a loss returned, if it has one value a token: another shape would be broadcast to a loss that nobody
    meant."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise PluginError(
            f"the policy loss {name!r} returned a {type(result).__name__}. Fix: return (loss per token [R], metrics per"
            " token)."
        )
    for what, value in (("a loss", result[0]), *((repr(metric), value) for metric, value in result[1].items())):
        if tuple(getattr(value, "shape", ())) != tuple(log_probs.shape):
            shape, tokens = list(getattr(value, "shape", ())), len(log_probs)
            raise PluginError(
                f"the policy loss {name!r} returned {what} of shape {shape} for {tokens} response tokens. Fix: return"
                " one value a token, [R]."
            )
    return result[0], result[1]


def value_objective(values: Tensor, columns: Mapping[str, Tensor], value_clip: float | None) -> tuple[Tensor, Sums]:
    """(Σ coef·½·max((V−G)², (clip(V, V_old ± value_clip)−G)²), metric sums); `value_clip` None: unclipped.

    `columns` hold coef, weight, `returns` and, for clipping, `values` (V_old).
    """
    returns = columns["returns"]
    error = (values - returns).square()
    if value_clip is not None:
        old = columns["values"]
        clipped = torch.minimum(torch.maximum(values, old - value_clip), old + value_clip)
        error = torch.maximum(error, (clipped - returns).square())
    sums = metric_sums(
        {"critic/value/mean": values.detach(), "critic/value_loss": error.detach() / 2}, columns["weight"]
    )
    return (columns["coef"] * error / 2).sum(), sums


def metric_sums(per_token: Mapping[str, Tensor], weight: Tensor) -> Sums:
    """(Σ w·m·x, Σ w·m) of every metric, 0-dim float64; tokens of weight 0 count nowhere, whatever their value."""
    counted = weight != 0
    weight = weight.double()
    total = weight.sum()
    # A choice and not a product, for 0 · NaN is NaN.
    return {name: (torch.where(counted, weight * x.double(), 0.0).sum(), total) for name, x in per_token.items()}
