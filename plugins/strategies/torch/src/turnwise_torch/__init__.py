"""Hooks of turnwise-torch: training with PyTorch on one device or, by FSDP2, on several; and what torch strategies
share."""

from turnwise import Implementation, hookimpl


@hookimpl
def train_strategies() -> list[Implementation]:
    """`torch`, which also answers to the field's `hf_train`, and to `hf_infer` as a reference without an optimizer."""
    return [
        Implementation(
            "torch",
            "turnwise_torch.strategy:TorchStrategy",
            config="turnwise_torch.config:TorchConfig",
            requires=("torch", "transformers"),
            aliases=("hf_train", "hf_infer", "fsdp2_train", "fsdp2_infer"),
            summary="AdamW with fp32 master weights on a transformers model: one device, or several by FSDP2; LoRA",
            fixtures="turnwise_torch.fixtures:strategy_fixture",
        )
    ]
