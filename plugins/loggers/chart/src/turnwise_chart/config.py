"""The options of the chart logger."""

from attrs import frozen


@frozen
class ChartConfig:
    """`panels`: one panel each, a list of metric names (`*` stands for any part of a name). `every`: the picture is
    redrawn every so many logged steps, and at the end."""

    panels: tuple[tuple[str, ...], ...] = (
        ("critic/score/mean", "val/score/mean"),
        ("env/*/success", "val/*/success"),
        ("policy/entropy",),
        ("policy/learning_rate",),
    )
    every: int = 50
