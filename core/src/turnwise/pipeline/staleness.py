"""How old the trained tokens are, what the correction makes of them, and which side waits for which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from turnwise.data.batch import Batch
from turnwise.data.ops import trains
from turnwise.data.trajectory import Trajectory
from turnwise.pipeline.clock import Clock


def of_tokens(batch: Batch, step: int) -> dict[str, float]:
    """Staleness of a step's sampled tokens (its number minus the version that sampled each), the versions within a
    response, and the share of tokens that trains: 1 unless a filter acts."""
    sampled = batch.sampled
    if not len(sampled):
        return {}
    versions, turn = batch.tokens["versions"][sampled], batch.tokens["turn"][sampled]
    # By turn, not by row: a row holds several responses, whose versions differ without any update in mid-sentence.
    newest = np.full(len(batch.turns), np.iinfo(np.int64).min)
    oldest = np.full(len(batch.turns), np.iinfo(np.int64).max)
    np.maximum.at(newest, turn, versions)
    np.minimum.at(oldest, turn, versions)
    answered = newest >= oldest
    owner = batch.tokens["trajectory"][sampled]
    kept, tag = trains(batch)[owner], batch.trajectories["tag"][owner]
    ratios = {f"/{name}": kept[tag == i] for i, name in enumerate(batch.tags) if (tag == i).any()} | {"": kept}
    return {
        "async/staleness/mean": float((step - versions).mean()),
        "async/staleness/max": float((step - versions).max()),
        "async/version_span": float((newest - oldest)[answered].max()),
        **{f"async/length_ratio{tag}": float(of_tag.mean()) for tag, of_tag in ratios.items()},
    }


def of_evaluation(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Versions between the oldest and the newest weights that answered: 0, or it was no evaluation of one model."""
    sampled = [turn.versions[turn.response_mask] for one in trajectories for turn in one.turns]
    versions = np.concatenate([np.zeros(0, np.int64), *sampled])
    return {"val/version_span": float(np.ptp(versions))} if len(versions) else {}


def effective_size(batch: Batch) -> dict[str, float]:
    """The effective sample size of the importance weights, (Σw)² / (n·Σw²) over the sampled tokens that train: 1 where
    all are equal."""
    counted = batch.sampled[trains(batch)[batch.tokens["trajectory"][batch.sampled]]]
    if "policy_weight" not in batch.tokens or not len(counted):
        return {}
    weight = batch.tokens["policy_weight"][counted]
    # Weights of 0 alone have no direction at all: no sample is effective.
    squares = float((weight**2).sum())
    return {"async/ess": float(weight.sum()) ** 2 / (len(weight) * squares) if squares else 0.0}


def occupation(gauges: Mapping[str, float], clock: Clock, worked: float) -> dict[str, float]:
    """The source's own metrics when the step was taken, and the seconds in which the trainer, and the sampler, had nothing to
    do. `worked`: those in which training episodes were played."""
    return dict(gauges) | {
        # Not the evaluation: there the trainer waits with r = 0, too.
        "time/trainer_idle": clock.seconds("rollout"),
        "time/sampler_idle": max(0.0, clock.elapsed - clock.seconds("eval") - worked),
        "time/publish": clock.seconds("sync"),
    }
