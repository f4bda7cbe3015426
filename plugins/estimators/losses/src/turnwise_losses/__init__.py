"""Hooks of turnwise-losses: policy losses in torch."""

from turnwise import Implementation, hookimpl


@hookimpl
def policy_losses() -> list[Implementation]:
    """Ten losses, each a module with a config class and a fixture of its own: `ppo` is PpoLoss of turnwise_losses.ppo,
    with its PpoConfig and ppo_fixture, and so are the others."""
    losses = {
        "ppo": "the clipped surrogate, with separate bounds and the dual clip",
        "vanilla": "the policy gradient itself: minus advantage times log-prob",
        "tis": "the policy gradient under a bounded constant ratio",
        "topr": "good trajectories unweighted, bad ones under a truncated ratio",
        "cispo": "the policy gradient under a clipped constant ratio",
        "kimi15": "the policy gradient with a quadratic pull to the old policy",
        "gspo": "the clipped surrogate on the ratio of a turn",
        "gmpo": "the geometric mean of a turn's clipped ratios",
        "sapo": "a sigmoid gate on the ratio in place of a clip",
        "dppo": "a trust region on the sampler's and the current probability",
    }
    return [
        Implementation(
            name,
            f"turnwise_losses.{name}:{name.capitalize()}Loss",
            config=f"turnwise_losses.config:{name.capitalize()}Config",
            requires=("torch",),
            summary=summary,
            fixtures=f"turnwise_losses.fixtures:{name}_fixture",
        )
        for name, summary in losses.items()
    ]
