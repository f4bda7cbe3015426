"""Hooks of turnwise-chart: learning curves as a PNG."""

from turnwise import Implementation, hookimpl


@hookimpl
def loggers() -> list[Implementation]:
    """The `chart` logger."""
    return [
        Implementation(
            "chart",
            "turnwise_chart.logger:ChartLogger",
            config="turnwise_chart.config:ChartConfig",
            requires=("matplotlib",),
            summary="curves.png: reward, success, entropy and learning rate over the steps",
        )
    ]
