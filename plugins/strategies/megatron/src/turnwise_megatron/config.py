"""The options of Megatron Core under its own names (strategy_config), and their arithmetic for `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen, validators

from turnwise.contracts.train import StrategyCapabilities
from turnwise.data.numbers import BYTES
from turnwise_torch.config import adam_betas


@frozen
class MegatronConfig:
    """Megatron Core's arguments by their own names; those without a field here are collected in `engine_args` (fields
    of its TransformerConfig, OptimizerConfig or DistributedDataParallelConfig). AdamW's `betas` and `eps`;
    `logits_chunk`: tokens whose logits exist at a time (0: as many as hold 2²⁶ logits)."""

    tensor_model_parallel_size: int = field(default=1, validator=validators.ge(1))
    pipeline_model_parallel_size: int = field(default=1, validator=validators.ge(1))
    context_parallel_size: int = field(default=1, validator=validators.ge(1))
    expert_model_parallel_size: int = field(default=1, validator=validators.ge(1))
    expert_tensor_parallel_size: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = True
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    bias_activation_fusion: bool = False
    apply_rope_fusion: bool = False
    betas: tuple[float, ...] = adam_betas()
    eps: float = field(default=1e-8, validator=validators.gt(0))
    logits_chunk: int = field(default=0, validator=validators.ge(0))
    engine_args: Mapping[str, Any] = field(factory=dict)

    @property
    def capabilities(self) -> StrategyCapabilities:
        """The arithmetic below; there are no adapters."""
        return StrategyCapabilities(data_parallel_size=self.data_parallel_size, memory=self.memory)

    def data_parallel_size(self, world: int) -> int:
        """dp = world / (tp · pp · cp). Raises ValueError where `world` devices cannot be divided so, or not among the
        experts."""
        tp, pp, cp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size
        if world % (tp * pp * cp):
            sizes = f"tensor_model_parallel_size {tp} × pipeline_model_parallel_size {pp} × context_parallel_size {cp}"
            raise ValueError(f"{world} devices are not divisible by {sizes}")
        ep, etp = self.expert_model_parallel_size, self.experts_tensor_parallel
        if (world // pp) % (ep * etp):
            sizes = f"expert_model_parallel_size {ep} × expert_tensor_parallel_size {etp}"
            raise ValueError(f"the {world // pp} devices of a pipeline stage are not divisible by {sizes}")
        return world // (tp * pp * cp)

    @property
    def experts_tensor_parallel(self) -> int:
        """Processes that share an expert: as many as share a layer, unless set otherwise."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def memory(self, facts: Mapping[str, Any]) -> dict[str, int]:
        """Bytes on one device: `weights`, `gradients` (fp32, as Megatron accumulates them), `optimizer`, `activations`.

        `facts`: `parameters` (a count), `dtype`, `world` (devices), `trainable` (default true), `activations` and
        `activations_kept` (bytes of a micro-batch on one device, with and without recomputation). Experts are left out:
        the parameters are taken for a dense model's.
        """
        count, width = int(facts["parameters"]), BYTES[facts["dtype"]]
        shard = count // (self.tensor_model_parallel_size * self.pipeline_model_parallel_size)
        split = self.context_parallel_size * (self.tensor_model_parallel_size if self.sequence_parallel else 1)
        held = int(
            facts[
                "activations"
                if self.recompute_granularity == "full" or not facts.get("trainable", True)
                else "activations_kept"
            ]
        )
        out = {"weights": shard * width, "gradients": 0, "optimizer": 0, "activations": held // split}
        if facts.get("trainable", True):
            sharing = (
                self.data_parallel_size(int(facts["world"])) * self.context_parallel_size
                if self.use_distributed_optimizer
                else 1
            )
            out |= {"gradients": shard * 4, "optimizer": shard * (8 if width == 4 else 12) // sharing}
        return out
