"""Hooks of turnwise-megatron: training with Megatron Core."""

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
            summary=(
                "Megatron Core: tensor, pipeline, context, sequence and expert parallel training of Llama, Qwen2, Qwen3"
                " and Qwen3-MoE"
            ),
            fixtures="turnwise_megatron.fixtures:strategy_fixture",
        )
    ]
