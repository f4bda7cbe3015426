"""Hooks of turnwise-batching: batch-adjust policies: how the rows of a step become optimizer updates."""

from turnwise import Implementation, hookimpl


@hookimpl
def batch_adjusts() -> list[Implementation]:
    """Six policies: one counts in trajectories, five in rows."""
    return [
        Implementation(
            "by_trajectory",
            "turnwise_batching.by_trajectory:ByTrajectory",
            config="turnwise_batching.config:ByTrajectoryConfig",
            summary="always the same number of updates, trajectories dealt into nearly equal parts",
        ),
        Implementation(
            "copy",
            "turnwise_batching.by_row:Copy",
            config="turnwise_batching.config:NoOptions",
            summary="fills the last update with copies of random rows",
        ),
        Implementation(
            "delete",
            "turnwise_batching.by_row:Delete",
            config="turnwise_batching.config:NoOptions",
            summary="drops the random rows that do not fill an update",
        ),
        Implementation(
            "random_sample",
            "turnwise_batching.by_row:RandomSample",
            config="turnwise_batching.config:NoOptions",
            summary="exactly one update of random rows",
        ),
        Implementation(
            "auto",
            "turnwise_batching.by_row:Auto",
            config="turnwise_batching.config:NoOptions",
            summary="copies or drops, whichever changes less",
        ),
        Implementation(
            "none",
            "turnwise_batching.by_row:Remainder",
            config="turnwise_batching.config:NoOptions",
            summary="the remainder is a smaller last update",
        ),
    ]
