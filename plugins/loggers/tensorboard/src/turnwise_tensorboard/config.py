"""The options of the tensorboard logger."""

from attrs import frozen


@frozen
class TensorboardConfig:
    """`images`: log PNG and GIF files that the run makes as images."""

    images: bool = True
