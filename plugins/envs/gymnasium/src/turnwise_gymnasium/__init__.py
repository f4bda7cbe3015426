"""Hooks of turnwise-gymnasium: FrozenLake as text, and a bridge to any Gymnasium environment of discrete actions."""

from turnwise import Implementation, hookimpl


@hookimpl
def environments() -> list[Implementation]:
    """`frozen_lake` and the bridge `gymnasium`."""
    return [
        Implementation(
            "frozen_lake",
            target="turnwise_gymnasium.frozen_lake:FrozenLake",
            summary="FrozenLake as text: random solvable maps, held out by content",
        ),
        Implementation(
            "gymnasium",
            target="turnwise_gymnasium.bridge:GymnasiumBridge",
            requires=("gymnasium",),
            fixtures="turnwise_gymnasium.fixtures:bridge_fixture",
            summary="any Gymnasium environment of discrete actions, by its id and a text template",
        ),
    ]


@hookimpl
def inference_backends() -> list[Implementation]:
    """The baseline player of `frozen_lake`."""
    return [
        Implementation(
            "frozen_lake_walker",
            target="turnwise_gymnasium.walker:FrozenLakeWalker",
            fixtures="turnwise_gymnasium.fixtures:walker_fixture",
            summary="a baseline without a model: walks toward the goal of frozen_lake and ignores the holes",
        )
    ]
