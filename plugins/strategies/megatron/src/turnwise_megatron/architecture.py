"""Which Hugging Face models become Megatron models: Llama, Qwen2, Qwen3 and Qwen3-MoE. Others are refused by name,
before anything loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise.errors import CheckpointError
from turnwise_megatron.config import MegatronConfig

# Those that convert.stage_entries can name, and model.transformer_config build.
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ROPES = ("default", "linear", "llama3")
"""Rotary embeddings whose frequencies are constant, so that transformers' own can be handed to Megatron."""


@frozen
class Experts:
    """The mixture of experts that stands in place of some layers' MLP."""

    count: int
    chosen: int
    """Experts of a token."""
    intermediate: int
    normalised: bool
    """Whether the weights of a token's experts add up to 1."""
    layers: tuple[bool, ...]
    """Which layers have experts."""


@frozen
class Architecture:
    """The facts of a model that its Megatron form needs; `config` is transformers' own."""

    config: Any
    family: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    epsilon: float
    experts: Experts | None

    @property
    def qkv_bias(self) -> bool:
        """Qwen2 alone has biases, on query, key and value."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each head's queries and keys."""
        return self.family in ("qwen3", "qwen3_moe")

    def experts_in(self, layer: int) -> int:
        """How many; 0: a dense layer."""
        return self.experts.count if self.experts is not None and self.experts.layers[layer] else 0

    def padded_vocabulary(self, tensor_parallel: int) -> int:
        """The vocabulary rounded up so that it divides among the tensor parallel ranks."""
        return -(-self.vocabulary // tensor_parallel) * tensor_parallel


def read_architecture(folder: Path) -> Architecture:
    """The architecture of a model folder. Raises CheckpointError: no model folder."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is not a model folder (it has no config.json). Fix: name a folder in Hugging Face layout as"
            " pretrain"
        )
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        # A class of the folder's own would be of no use: layers are built here, by the architecture's name.
        raise CheckpointError(
            f"{folder} holds a model of no architecture that transformers has. Fix: another pretrain, or strategy torch"
        ) from error
    return Architecture(
        config=config,
        family=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        # Qwen3 names it: there it need not be hidden_size ÷ heads.
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        epsilon=config.rms_norm_eps,
        experts=_experts(config),
    )


def _experts(config: Any) -> Experts | None:
    """None for a dense model, and for one whose every layer is dense."""
    if config.model_type != "qwen3_moe":
        return None
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    layers = tuple(
        config.num_experts > 0 and layer not in dense and (layer + 1) % step == 0
        for layer in range(config.num_hidden_layers)
    )
    if not any(layers):
        return None
    return Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob, layers
    )


def refusals(folder: Path, config: MegatronConfig) -> list[str]:
    """One line for each thing that keeps the model in `folder` from this strategy; a folder that is not there says
    nothing."""
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    family = facts.get("model_type")
    if family not in FAMILIES:
        return [
            f"strategy megatron has no conversion for {family!r} ({folder}). It has: {', '.join(FAMILIES)}. Fix:"
            " strategy_name: torch"
        ]
    architecture = read_architecture(folder)
    return [f"{line} ({folder})" for line in (*_unknown_parts(architecture), *_indivisible(architecture, config))]


def _unknown_parts(architecture: Architecture) -> Iterator[str]:
    config, family = architecture.config, architecture.family
    for name, known in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
        ("use_sliding_window", False),
    ):
        if getattr(config, name, known) not in (known, None):
            yield (
                f"strategy megatron has no conversion for {family} with {name}: {getattr(config, name)}. Fix:"
                " strategy_name: torch or deepspeed"
            )
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others:
        yield (
            f"strategy megatron has no conversion for {family} with layers of {', '.join(sorted(others))}. Fix:"
            " strategy_name: torch"
        )
    experts = architecture.experts
    # Megatron refuses it: a softmax over one expert is always 1, and gives the router no gradient.
    if experts is not None and experts.chosen == 1 and experts.normalised:
        yield (
            f"strategy megatron has no conversion for {family} with num_experts_per_tok: 1 and norm_topk_prob: true."
            " Fix: strategy_name: torch"
        )
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ROPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield (
            f"strategy megatron has no conversion for {family} with rope_parameters: {rope}. It has:"
            f" {', '.join(ROPES)}. Fix: strategy_name: torch"
        )


def _indivisible(architecture: Architecture, config: MegatronConfig) -> Iterator[str]:
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    experts = architecture.experts
    parts = {"num_key_value_heads": architecture.groups, "num_attention_heads": architecture.heads}
    # Where every layer has experts, no matrix has the dense size.
    if experts is None or not all(experts.layers):
        parts["intermediate_size"] = architecture.intermediate
    for name, value in parts.items():
        if value % tensor:
            yield f"tensor_model_parallel_size: {tensor} does not divide {name} {value} of the model"
    # With these Megatron divides the layers itself, and says so where it cannot.
    uneven = {"num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"} & set(config.engine_args)
    if architecture.layers % pipeline and not uneven:
        yield f"pipeline_model_parallel_size: {pipeline} does not divide the {architecture.layers} layers of the model"
    if experts is not None:
        yield from _expert_sizes(experts, config)
    elif config.expert_model_parallel_size > 1:
        yield (
            f"expert_model_parallel_size: {config.expert_model_parallel_size}, and {architecture.family} has no"
            " experts. Fix: 1"
        )
    elif config.expert_tensor_parallel_size is not None:
        yield (
            f"expert_tensor_parallel_size: {config.expert_tensor_parallel_size}, and {architecture.family} has no"
            " experts. Fix: remove it"
        )


def _expert_sizes(experts: Experts, config: MegatronConfig) -> Iterator[str]:
    tensor, expert, expert_tensor = (
        config.tensor_model_parallel_size,
        config.expert_model_parallel_size,
        config.experts_tensor_parallel,
    )
    if experts.count % expert:
        yield f"expert_model_parallel_size: {expert} does not divide the {experts.count} experts of the model"
    if experts.intermediate % expert_tensor:
        name = (
            "tensor_model_parallel_size"
            if config.expert_tensor_parallel_size is None
            else "expert_tensor_parallel_size"
        )
        yield f"{name}: {expert_tensor} does not divide moe_intermediate_size {experts.intermediate} of the model"
    if tensor > 1 and not config.sequence_parallel:
        yield (
            f"tensor_model_parallel_size: {tensor} of a model with experts needs sequence parallelism. Fix:"
            " sequence_parallel: true"
        )
    # Megatron reduces the gradients of experts as those of other weights then.
    if expert == 1 and expert_tensor != tensor:
        yield f"expert_tensor_parallel_size: {expert_tensor} needs an expert_model_parallel_size over 1. Fix: remove it"
