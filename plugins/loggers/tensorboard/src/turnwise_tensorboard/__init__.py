"""Hooks of turnwise-tensorboard: metrics for TensorBoard."""

from turnwise import Implementation, hookimpl


@hookimpl
def loggers() -> list[Implementation]:
    """The `tensorboard` logger."""
    return [
        Implementation(
            "tensorboard",
            "turnwise_tensorboard.logger:TensorboardLogger",
            config="turnwise_tensorboard.config:TensorboardConfig",
            requires=("tensorboard",),
            summary="scalars and images for TensorBoard, without torch or TensorFlow",
        )
    ]
