"""Hooks of turnwise-deepspeed: training with DeepSpeed ZeRO."""

from turnwise import Implementation, hookimpl


@hookimpl
def train_strategies() -> list[Implementation]:
    """`deepspeed`, which also answers to `deepspeed_train` and `deepspeed_infer`."""
    return [
        Implementation(
            "deepspeed",
            "turnwise_deepspeed.strategy:DeepspeedStrategy",
            config="turnwise_deepspeed.config:DeepspeedConfig",
            requires=("torch", "transformers", "deepspeed"),
            aliases=("deepspeed_train", "deepspeed_infer"),
            presets={
                "deepspeed_zero": {"zero_optimization": {"stage": 0}},
                "deepspeed_zero2": {"zero_optimization": {"stage": 2}},
                "deepspeed_zero3": {"zero_optimization": {"stage": 3}},
                "deepspeed_zero3_cpuoffload": {
                    "zero_optimization": {
                        "stage": 3,
                        "offload_optimizer": {"device": "cpu", "pin_memory": True},
                        "offload_param": {"device": "cpu", "pin_memory": True},
                    }
                },
            },
            summary="DeepSpeed ZeRO 0 to 3 on one and more processes, with CPU offload",
            fixtures="turnwise_deepspeed.fixtures:strategy_fixture",
        )
    ]
