"""Hooks of turnwise-filters: which trajectories train."""

from turnwise import Implementation, hookimpl


@hookimpl
def group_filters() -> list[Implementation]:
    """Three filters, each a page."""
    return [
        Implementation(
            "no_signal", "turnwise_filters.no_signal:NoSignal", summary="drops groups whose scores are all equal"
        ),
        Implementation(
            "top_spread",
            "turnwise_filters.top_spread:TopSpread",
            config="turnwise_filters.config:TopSpreadConfig",
            summary="keeps the groups whose scores spread most (StarPO-S)",
        ),
        Implementation(
            "overlong",
            "turnwise_filters.overlong:Overlong",
            summary="drops trajectories that ran out of room for another token",
        ),
    ]
