"""Hooks of turnwise-wandb: metrics, trajectories and files for Weights & Biases."""

from turnwise import Implementation, hookimpl


@hookimpl
def loggers() -> list[Implementation]:
    """The `wandb` logger."""
    return [
        Implementation(
            "wandb",
            "turnwise_wandb.logger:WandbLogger",
            config="turnwise_wandb.config:WandbConfig",
            requires=("wandb",),
            summary="metrics, trajectories and files for Weights & Biases, online or offline",
            fixtures="turnwise_wandb.fixtures:logger_fixture",
        )
    ]
