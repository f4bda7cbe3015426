"""Hooks of turnwise-deepspeed: configurations for DeepSpeed, planned and checked; the engine itself does not run in this version."""

from turnwise import Implementation, hookimpl


@hookimpl
def train_strategies() -> list[Implementation]:
    """`deepspeed`, which also answers to `deepspeed_train` and `deepspeed_infer`."""
    return [
        Implementation(
            "deepspeed",
            "turnwise_deepspeed.strategy:DeepspeedStrategy",
            config="turnwise_deepspeed.config:DeepspeedConfig",
            requires=("deepspeed",),
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
            plans_only=True,
            summary="configurations for DeepSpeed ZeRO; this version plans and checks them, it does not run the engine",
        )
    ]
