"""The Megatron model of a rank: its own GPTModel with plain attention and norms, so that nothing of it needs
Transformer Engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from turnwise.errors import ConfigError
from turnwise_megatron.architecture import Architecture
from turnwise_megatron.config import MegatronConfig
from turnwise_megatron.parallel import Parallel
from turnwise_torch.models import first_line


class RMSNorm(nn.Module):
    """x / √(mean x² + eps) · weight, over the last dimension, in fp32 as transformers computes it. Megatron's local one
    refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # With sequence parallelism each rank norms other positions: their gradients have to be summed.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron then adds its gradient over the ranks

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] → [..., h], in the dtype of `hidden`."""
        # The weight is multiplied after rounding back, as transformers does: in another order bf16 rounds otherwise.
        wide = hidden.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(hidden.dtype)


class Attention(nn.Module):
    """Causal scaled dot product attention of query [s, b, heads, d], key and value [s, b, groups, d] → [s, b, heads·d].

    With context parallelism every rank has two chunks of the positions (`context_positions`) and gathers keys and
    values of all.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.group = get_context_parallel_group() if config.context_parallel_size > 1 else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor:
        """As of the class; `attention_mask` is Megatron's, and unused."""
        mask = None
        if self.group is not None:
            size, width = self.group.size(), len(query)
            # The gradient of a key is the sum over the ranks that used it.
            options = {
                "tensor_parallel_output_grad": True,
                "group": self.group,
            }
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), **options) for x in (key, value))
            there = torch.cat([context_positions(width * size, size, rank) for rank in range(size)])
            here = context_positions(width * size, size, self.group.rank())
            # Gathered keys stand in the order of the ranks, not of the positions, so is_causal would be wrong.
            mask = (there[None] <= here[:, None]).to(query.device)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class Router(TopKRouter):
    """The experts of every token and their weights, and nothing else; Megatron's own forward needs a name of
    Transformer Engine."""

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """hidden [s, b, h] → weights [s·b, experts], zero but for the chosen, and which those are."""
        logits = F.linear(hidden, self.weight).flatten(0, 1)
        return topk_routing_with_score_function(logits, self.topk, use_pre_softmax=self.config.moe_router_pre_softmax)


def context_positions(width: int, size: int, rank: int) -> Tensor:
    """int64 [width / size]: the positions of a context parallel rank: of 2·size chunks the one from the front and the
    one from the end that share the work of causal attention evenly, as Megatron's rotary embedding has it."""
    chunk = width // (2 * size)
    return torch.cat([torch.arange(chunk) + start * chunk for start in (rank, 2 * size - 1 - rank)])


class Model(GPTModel):
    """Megatron's GPTModel that ends with the hidden states [s, b, h]: the head runs later, on the positions that
    predict alone.

    A critic has `value_head` in place of the output layer.
    """

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """[padded vocabulary / tensor parallel size, h]."""
        return (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )


def transformer_config(
    architecture: Architecture, config: MegatronConfig, dtype: torch.dtype, extra: Mapping[str, Any]
) -> TransformerConfig:
    """Megatron's configuration of the model. Raises ConfigError with Megatron's own words."""
    options = {
        "num_layers": architecture.layers,
        "hidden_size": architecture.hidden,
        "ffn_hidden_size": architecture.intermediate,
        "num_attention_heads": architecture.heads,
        "num_query_groups": architecture.groups,
        "kv_channels": architecture.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.epsilon,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.qkv_bias,
        "qk_layernorm": architecture.qk_norm,
        # Megatron's default is 0.1; old and new log-probs of unchanged weights have to be equal.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "transformer_impl": "local",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        # The weights are read from a folder. perform_initialization: without it parameters are not marked as tensor
        # parallel, and gradient norms are wrong.
        "use_cpu_initialization": True,
        "perform_initialization": True,
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "context_parallel_size": config.context_parallel_size,
        "sequence_parallel": config.sequence_parallel and config.tensor_model_parallel_size > 1,
        # Micro-batches differ in width, which stages then tell each other.
        "variable_seq_lengths": config.pipeline_model_parallel_size > 1,
        "moe_token_dispatcher_type": "alltoall",  # of no effect without experts, but variable_seq_lengths insists
        **_expert_options(architecture, config),
        "batch_p2p_sync": False,
        "deallocate_pipeline_outputs": True,
        # gradients are added up, over micro-batches and ranks, and nothing is divided
        "calculate_per_token_loss": True,
        "bias_activation_fusion": config.bias_activation_fusion,
        "apply_rope_fusion": config.apply_rope_fusion,
        # Fused kernels need Apex, Transformer Engine or a compiler; what may be fused on a GPU has a key of its own.
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        **_recompute_options(config),
        **extra,
    }
    try:
        return TransformerConfig(**options)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"strategy megatron: Megatron refuses the configuration: {first_line(error)}. Fix: correct strategy_config"
        ) from error


def _recompute_options(config: MegatronConfig) -> dict[str, Any]:
    """What the backward pass computes again; Megatron takes no method and number beside `selective`."""
    options: dict[str, Any] = {"recompute_granularity": config.recompute_granularity}
    if config.recompute_granularity == "full":
        options |= {
            "recompute_method": config.recompute_method or "uniform",
            "recompute_num_layers": config.recompute_num_layers or 1,
        }
    return options


def _expert_options(architecture: Architecture, config: MegatronConfig) -> dict[str, Any]:
    """Every token reaches all its experts (no capacity, no drops), and the router has no loss of its own: what
    transformers computes."""
    experts = architecture.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_layer_freq": [int(sparse) for sparse in experts.layers],
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_router_topk": experts.chosen,
        # a softmax over the chosen alone is the normalised softmax over all
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.experts_tensor_parallel,
    }


def build(architecture: Architecture, config: TransformerConfig, parallel: Parallel, value: bool) -> Model:
    """This rank's stage, with random weights, on the CPU."""
    layers = [_layer(architecture, number) for number in stage_layers(config)[parallel.pipeline]]
    model = Model(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=architecture.padded_vocabulary(config.tensor_model_parallel_size),
        max_sequence_length=architecture.config.max_position_embeddings,
        pre_process=parallel.pipeline == 0,
        post_process=parallel.last_stage,
        # Each tensor parallel rank keeps its part of the vocabulary's logits: logprobs never gathers them.
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied and not value,
        position_embedding_type="rope",
    )
    # transformers' own: the base and scaling that rope_parameters name are no arguments above.
    model.rotary_pos_emb.inv_freq = rotary_frequencies(architecture)
    if value and parallel.last_stage:
        # A critic's folder has nothing for it, and it is as large as the vocabulary.
        del model.output_layer
        model.value_head = nn.Linear(architecture.hidden, 1, dtype=config.params_dtype)
        for parameter in model.value_head.parameters():
            # Every tensor parallel rank has the whole gradient already.
            parameter.sequence_parallel = False
    return model


def _layer(architecture: Architecture, number: int) -> Any:
    """Megatron's local layer, with this module's norms, attention and router."""
    experts = architecture.experts_in(number)
    layer = get_gpt_layer_local_spec(
        num_experts=experts or None, qk_layernorm=architecture.qk_norm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if experts:
        layer.submodules.mlp.submodules.router = Router
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = Attention
    if architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def is_expert(parameter: Tensor) -> bool:
    """Whether expert parallel ranks hold different values of a parameter, so that it has optimizer and gradient groups
    of its own."""
    return not getattr(parameter, "allreduce", True)


def rotary_frequencies(architecture: Architecture) -> Tensor:
    """float32 [head_dim / 2]: transformers' own, scaled as the model's rope_parameters say."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = architecture.config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        powers = torch.arange(0, architecture.head_dim, 2, dtype=torch.int64).float() / architecture.head_dim
        return 1.0 / (rope["rope_theta"] ** powers)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](architecture.config, torch.device("cpu"))[0].float()


def stage_layers(config: TransformerConfig) -> list[range]:
    """The layers of every pipeline stage."""
    stages = []
    for stage in range(config.pipeline_model_parallel_size):
        start = get_transformer_layer_offset(config, pp_rank=stage)
        stages.append(range(start, start + get_num_layers_to_build(config, pp_rank=stage)))
    return stages
