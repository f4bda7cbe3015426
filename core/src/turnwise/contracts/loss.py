"""Policy losses: torch, but not here. A loss maps the view of a micro-batch's response tokens to a loss per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from attrs import field, frozen

from turnwise.contracts.capabilities import Capabilities


@frozen
class LossContext:
    """`ratio_type`: token or segment, see `LossView.log_ratio`."""

    ratio_type: str = "token"


@frozen(eq=False)
class LossView:
    """Flat tensors [R] over the response tokens of whole samples.

    `log_probs` (new, with gradient), `old_log_probs`, `advantages`, `coef`; `infer_log_probs`, `ref_log_probs`,
    `entropy` where they exist, else None; `sample`, `turn`, `trajectory` int64; every further column of the batch in
    `extras`, among them what the pipeline
    computes over whole trajectories: `scores` and `trajectory_advantages` (the mean advantage of the token's
    trajectory). `log_ratio` is log_probs − old_log_probs clamped to ±20, at the level that `ratio_type` chose: the
    losses of the PPO family use it alone. The tokens of one (trajectory, turn) are a segment; they stand together in
    one view.
    """

    log_probs: Any
    old_log_probs: Any
    advantages: Any
    coef: Any
    log_ratio: Any
    sample: Any
    turn: Any
    trajectory: Any
    infer_log_probs: Any = None
    ref_log_probs: Any = None
    entropy: Any = None
    extras: Mapping[str, Any] = field(factory=dict)


@frozen
class LossCapabilities(Capabilities):
    """`uses_ratio`: the old log-probs, or the sampler's, matter; False: more than one update a step is a warning. `own_ratio`: it does not use
    the ratio that `ratio_type` chooses. `needs_infer_log_probs`: refused without the sampler's log-probs, and beside a
    correction's weight, for which it stands itself. `clips`: its metric `clip_frac` is that of a clipped surrogate,
    which has a healthy range.

    A loss that imports torch declares them on its config class: a configuration is read without it."""

    kind: ClassVar[str] = "policy_loss"
    uses_ratio: bool = True
    own_ratio: bool = False
    needs_infer_log_probs: bool = False
    clips: bool = False


class PolicyLoss(Protocol):
    """Built as `Loss(config, context)`. What the pipeline should know of it, it declares as LossCapabilities."""

    # Any: tensors of the strategy's framework, which the core does not import
    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        """(loss per token [R] with gradient, metrics per token: name → [R], detached)."""
        ...
