"""Hooks of turnwise-swanlab: metrics, trajectories and files for SwanLab."""

from turnwise import Implementation, hookimpl


@hookimpl
def loggers() -> list[Implementation]:
    """The `swanlab` logger."""
    return [
        Implementation(
            "swanlab",
            "turnwise_swanlab.logger:SwanlabLogger",
            config="turnwise_swanlab.config:SwanlabConfig",
            requires=("swanlab",),
            summary="metrics, trajectories and files for SwanLab, online or offline",
            fixtures="turnwise_swanlab.fixtures:logger_fixture",
        )
    ]
