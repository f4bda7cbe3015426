"""The optimizer under DeepSpeed: torch's AdamW, fp32 masters that start from the folder's own values, gradients that
can be dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from turnwise_deepspeed.config import DeepspeedConfig


def starting_values(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """The trained parameters and their values now, for masters."""
    return {parameter: parameter.data for parameter in model.parameters() if parameter.requires_grad}


def round_to(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters in `dtype`, buffers as they are; the model's configuration says so."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.dtype = dtype


def build_optimizer(
    deepspeed: Any, model: nn.Module, config: DeepspeedConfig, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019) over the trained parameters; those of one dimension (norms, biases) are not
    decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    betas = (config.betas[0], config.betas[1])
    if config.zero_force_ds_cpu_optimizer:
        from turnwise_deepspeed.compiled import prepare_cpu_adam

        prepare_cpu_adam()
        return deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=0.0, betas=betas, eps=config.eps, adamw_mode=True)
    # The rate comes with every step (DeepspeedStrategy._optimize).
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.eps)


@torch.no_grad()
def set_masters(deepspeed: Any, engine: Any, stage: int, starts: Mapping[nn.Parameter, Tensor]) -> None:
    """Give the fp32 masters of 16-bit parameters these values: DeepSpeed starts them from the rounded ones."""
    if stage > 0:
        for parameter, value in starts.items():
            # From stage 1 on masters are cut and flattened over the ranks: DeepSpeed's own function finds a parameter's
            # part.
            deepspeed.utils.safe_set_full_fp32_param(parameter, value.to(parameter.device))
        return
    optimizer = engine.optimizer
    for rounded, wide in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(rounded, wide, strict=True):
            master.copy_(starts[parameter])


def drop_gradients(engine: Any) -> None:
    """Forget every gradient: what an update that failed has summed, and what a step has used.

    DeepSpeed overwrites its buffers with the gradients of the first micro-batch and adds the others'. A parameter that
    the first does not use (a vision tower, an expert) would go on with what the update before left there.
    """
    optimizer = engine.optimizer
    optimizer.zero_grad()
    engine.zero_grad()
    # Where each stage keeps sums differs, and DeepSpeed names no method that clears all: what is there is emptied.
    if hasattr(optimizer, "clear_hp_grads"):
        optimizer.clear_hp_grads()
    for name in ("averaged_gradients", "all_grad_tensors"):
        held = getattr(optimizer, name, {})
        for group in held:
            held[group] = None
    masters = [
        *getattr(optimizer, "fp32_partitioned_groups_flat", ()),
        *getattr(optimizer, "single_partition_of_fp32_groups", ()),
    ]
    buffers = [getattr(optimizer, "grad_partitions_flat_buffer", None), *(master.grad for master in masters)]
    for buffer in (*buffers, *getattr(optimizer, "accumulated_grads_in_cpu", {}).values()):
        if buffer is not None:
            buffer.zero_()
