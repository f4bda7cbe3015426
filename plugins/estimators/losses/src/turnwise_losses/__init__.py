"""Hooks of turnwise-losses: policy losses in torch."""

from turnwise import Implementation, hookimpl


@hookimpl
def policy_losses() -> list[Implementation]:
    """Ten losses, each a module with a config class and a fixture of its own."""
    losses = (
        ("ppo", "PpoLoss", "PpoConfig", "the clipped surrogate, with separate bounds and the dual clip"),
        ("vanilla", "VanillaLoss", "VanillaConfig", "the policy gradient itself: minus advantage times log-prob"),
        ("tis", "TisLoss", "TisConfig", "the policy gradient under a bounded constant ratio"),
        ("topr", "ToprLoss", "ToprConfig", "good trajectories unweighted, bad ones under a truncated ratio"),
        ("cispo", "CispoLoss", "CispoConfig", "the policy gradient under a clipped constant ratio"),
        ("kimi15", "Kimi15Loss", "Kimi15Config", "the policy gradient with a quadratic pull to the old policy"),
        ("gspo", "GspoLoss", "GspoConfig", "the clipped surrogate on the ratio of a turn"),
        ("gmpo", "GmpoLoss", "GmpoConfig", "the geometric mean of a turn's clipped ratios"),
        ("sapo", "SapoLoss", "SapoConfig", "a sigmoid gate on the ratio in place of a clip"),
        ("dppo", "DppoLoss", "DppoConfig", "a trust region on the sampler's and the current probability"),
    )
    return [
        Implementation(
            name,
            f"turnwise_losses.{name}:{loss}",
            config=f"turnwise_losses.config:{config}",
            requires=("torch",),
            summary=summary,
            fixtures=f"turnwise_losses.fixtures:{name}_fixture",
        )
        for name, loss, config, summary in losses
    ]
