"""The options of the jsonl logger."""

from attrs import field, frozen, validators


@frozen
class JsonlConfig:
    """`trajectories`: write trajectories too. `every`: those of training steps 0, every, 2·every, …; those of
    evaluations always."""

    trajectories: bool = True
    every: int = field(default=10, validator=validators.ge(1))
