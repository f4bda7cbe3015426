"""Hooks of turnwise-megatron: configurations for Megatron, planned and checked; the engine itself does not run in this version."""

from turnwise import Implementation, hookimpl


@hookimpl
def train_strategies() -> list[Implementation]:
    """`megatron`, which also answers to `megatron_train` and `megatron_infer`."""
    return [
        Implementation(
            "megatron",
            "turnwise_megatron.strategy:MegatronStrategy",
            config="turnwise_megatron.config:MegatronConfig",
            requires=("megatron",),
            aliases=("megatron_train", "megatron_infer"),
            plans_only=True,
            summary="configurations for Megatron Core; this version plans and checks them, it does not run the engine",
        )
    ]
