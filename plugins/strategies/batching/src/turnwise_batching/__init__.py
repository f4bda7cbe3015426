"""Hooks of turnwise-batching: batch-adjust policies: how the rows of a step become optimizer updates."""

from turnwise.hookspecs import Implementation, hookimpl


@hookimpl
def batch_adjusts() -> list[Implementation]:
    """Six policies: one counts in trajectories, five in rows."""
    summaries = {
        "by_trajectory": ("by_trajectory:ByTrajectory", "always the same number of updates, trajectories dealt into nearly equal parts"),
        "copy": ("by_row:Copy", "fills the last update with copies of random rows"),
        "delete": ("by_row:Delete", "drops the random rows that do not fill an update"),
        "random_sample": ("by_row:RandomSample", "exactly one update of random rows"),
        "auto": ("by_row:Auto", "copies or drops, whichever changes less"),
        "none": ("by_row:Remainder", "the remainder is a smaller last update"),
    }
    return [
        Implementation(name, f"turnwise_batching.{target}", config="turnwise_batching.config:NoOptions", summary=summary)
        for name, (target, summary) in summaries.items()
    ]
