"""Hooks of turnwise-losses: policy losses in torch."""

from turnwise import Implementation, hookimpl


@hookimpl
def policy_losses() -> list[Implementation]:
    """`ppo` and `vanilla`."""
    return [
        Implementation(
            "ppo",
            "turnwise_losses.ppo:PpoLoss",
            config="turnwise_losses.config:PpoConfig",
            requires=("torch",),
            summary="the clipped surrogate, with separate bounds and the dual clip",
            fixtures="turnwise_losses.fixtures:ppo_fixture",
        ),
        Implementation(
            "vanilla",
            "turnwise_losses.vanilla:VanillaLoss",
            config="turnwise_losses.config:VanillaConfig",
            requires=("torch",),
            summary="the policy gradient itself: minus advantage times log-prob",
            fixtures="turnwise_losses.fixtures:vanilla_fixture",
        ),
    ]
