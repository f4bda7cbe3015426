"""Hooks of turnwise-losses: policy losses in torch."""

from turnwise import Implementation, hookimpl


@hookimpl
def policy_losses() -> list[Implementation]:
    """Ten losses, each a module with a config class and a fixture of its own."""
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
        Implementation(
            "tis",
            "turnwise_losses.tis:TisLoss",
            config="turnwise_losses.config:TisConfig",
            requires=("torch",),
            summary="the policy gradient under a bounded constant ratio",
            fixtures="turnwise_losses.fixtures:tis_fixture",
        ),
        Implementation(
            "topr",
            "turnwise_losses.topr:ToprLoss",
            config="turnwise_losses.config:ToprConfig",
            requires=("torch",),
            summary="good trajectories unweighted, bad ones under a truncated ratio",
            fixtures="turnwise_losses.fixtures:topr_fixture",
        ),
        Implementation(
            "cispo",
            "turnwise_losses.cispo:CispoLoss",
            config="turnwise_losses.config:CispoConfig",
            requires=("torch",),
            summary="the policy gradient under a clipped constant ratio",
            fixtures="turnwise_losses.fixtures:cispo_fixture",
        ),
        Implementation(
            "kimi15",
            "turnwise_losses.kimi15:Kimi15Loss",
            config="turnwise_losses.config:Kimi15Config",
            requires=("torch",),
            summary="the policy gradient with a quadratic pull to the old policy",
            fixtures="turnwise_losses.fixtures:kimi15_fixture",
        ),
        Implementation(
            "gspo",
            "turnwise_losses.gspo:GspoLoss",
            config="turnwise_losses.config:GspoConfig",
            requires=("torch",),
            summary="the clipped surrogate on the ratio of a turn",
            fixtures="turnwise_losses.fixtures:gspo_fixture",
        ),
        Implementation(
            "gmpo",
            "turnwise_losses.gmpo:GmpoLoss",
            config="turnwise_losses.config:GmpoConfig",
            requires=("torch",),
            summary="the geometric mean of a turn's clipped ratios",
            fixtures="turnwise_losses.fixtures:gmpo_fixture",
        ),
        Implementation(
            "sapo",
            "turnwise_losses.sapo:SapoLoss",
            config="turnwise_losses.config:SapoConfig",
            requires=("torch",),
            summary="a sigmoid gate on the ratio in place of a clip",
            fixtures="turnwise_losses.fixtures:sapo_fixture",
        ),
        Implementation(
            "dppo",
            "turnwise_losses.dppo:DppoLoss",
            config="turnwise_losses.config:DppoConfig",
            requires=("torch",),
            summary="a trust region on the sampler's and the current probability",
            fixtures="turnwise_losses.fixtures:dppo_fixture",
        ),
    ]
