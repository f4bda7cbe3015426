"""Policy losses: torch, but not here. A loss maps the view of a micro-batch's response tokens to a loss per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from attrs import field, frozen


@frozen
class LossContext:
    """`ratio_type`: token or segment, see `LossView.log_ratio`."""

    ratio_type: str = "token"


@frozen(eq=False)
class LossView:
    """Flat tensors [R] over the response tokens of whole samples.

    `log_probs` (new, with gradient), `old_log_probs`, `advantages`, `coef`; `infer_log_probs`, `ref_log_probs`, `entropy` where they
    exist, else None; `sample`, `turn`, `trajectory` int64; every further column of the batch in `extras`, among them what the pipeline
    computes over whole trajectories: `scores` and `trajectory_advantages` (the mean advantage of the token's trajectory). `log_ratio` is
    log_probs − old_log_probs clamped to ±20, at the level that `ratio_type` chose: the losses of the PPO family use it alone.
    The tokens of one (trajectory, turn) are a segment; they stand together in one view.
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


class PolicyLoss(Protocol):
    """Built as `Loss(config, context)`. `uses_ratio`: whether old log-probs matter (else more than one update a step is a warning).

    The config class may say what the configuration's checks need to know, without torch: `uses_ratio` False; `own_ratio` True
    (`ratio_type` has no effect); `needs_infer_log_probs` True (refused without the sampler's log-probs, and beside a correction's weight,
    for which it stands itself); `depends_on_rows` True (merging turns into one row changes the loss). Each is a class variable or property.
    """

    uses_ratio: bool

    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        """(loss per token [R] with gradient, metrics per token: name → [R], detached)."""
        ...
