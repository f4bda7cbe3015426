"""`engine_args`: names compared with Megatron's own dataclasses, and those that other keys or this strategy decide."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.errors import Problem, did_you_mean

DECIDED = {
    "the model folder's config.json": (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization"
        " layernorm_epsilon gated_linear_unit activation_func add_bias_linear add_qkv_bias qk_layernorm"
        " rotary_interleaved multi_latent_attention mtp_num_layers num_moe_experts moe_layer_freq moe_ffn_hidden_size"
        " moe_router_topk moe_router_pre_softmax moe_router_score_function"
    ),
    "model_args.dtype": (
        "bf16 fp16 params_dtype pipeline_dtype autocast_dtype enable_autocast fp8 fp4 loss_scale initial_loss_scale"
    ),
    "training_args": "lr min_lr decoupled_lr decoupled_min_lr weight_decay",
    "max_grad_norm": "clip_grad",
    "betas and eps": "adam_beta1 adam_beta2 adam_eps",
    "strategy megatron itself": (
        "optimizer decoupled_weight_decay apply_wd_to_qk_layernorm transformer_impl use_cpu_initialization"
        " perform_initialization init_method output_layer_init_method variable_seq_lengths calculate_per_token_loss"
        " deallocate_pipeline_outputs moe_token_dispatcher_type batch_p2p_sync grad_scale_func"
        " finalize_model_grads_func no_sync_func grad_sync_func param_sync_func hidden_dropout attention_dropout"
        " grad_reduce_in_fp32 average_in_collective bias_dropout_fusion masked_softmax_fusion persist_layer_norm"
        " gradient_accumulation_fusion timers"
    ),
}
UNSUPPORTED = (
    "virtual_pipeline_model_parallel_size pipeline_model_parallel_layout hybrid_context_parallel overlap_param_gather"
    " overlap_param_gather_with_optimizer_step use_megatron_fsdp use_precision_aware_optimizer optimizer_cpu_offload"
    " cpu_offloading defer_embedding_wgrad_compute delay_wgrad_compute overlap_moe_expert_parallel_comm"
    " use_layer_wise_distributed_optimizer num_distributed_optimizer_instances enable_cuda_graph cuda_graph_impl"
    " use_kitchen fine_grained_activation_offloading experimental_attention_variant"
)


def problems(role: str, given: Mapping[str, Any]) -> Iterator[Problem]:
    """One for each name that Megatron does not have, that another key decides, or that this strategy does not
    support."""
    where = f"{role}.strategy_args.strategy_config"
    decided = {name: key for key, names in DECIDED.items() for name in names.split()}
    known = fields() if given and importlib.util.find_spec("megatron") else None
    for name in given:
        if name in decided:
            yield Problem(f"{where}.{name}", f"decided by {decided[name]}. Fix: remove it")
        elif name in UNSUPPORTED.split() or name.startswith("moe_"):
            yield Problem(
                f"{where}.{name}", "it is Megatron's, and strategy megatron does not support it. Fix: remove it"
            )
        elif known is not None and name not in known:
            choices = known - decided.keys() - set(UNSUPPORTED.split())
            text = (
                f"Megatron has no such argument.{did_you_mean(name, choices)} Fix: a field of TransformerConfig or"
                " OptimizerConfig"
            )
            yield Problem(f"{where}.{name}", text)


def fields() -> set[str]:
    """The names of Megatron's model, gradient buffer and optimizer configurations."""
    return {name for names in _classes().values() for name in names}


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(those of the model, those of gradient buffers and optimizer); a name of both goes to both."""
    classes = _classes()
    model = {name: value for name, value in given.items() if name in classes["TransformerConfig"]}
    rest = {
        name: value
        for name, value in given.items()
        if name in classes["OptimizerConfig"] | classes["DistributedDataParallelConfig"]
    }
    return model, rest


def _classes() -> dict[str, set[str]]:
    from turnwise_megatron.parallel import import_megatron

    import_megatron()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    return {each.__name__: {field.name for field in dataclasses.fields(each)} for each in classes}
