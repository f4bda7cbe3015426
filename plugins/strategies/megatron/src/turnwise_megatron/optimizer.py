"""Megatron's gradient buffers and its optimizer, made to step as AdamW does in turnwise_torch: sums, one norm, decay
for matrices alone."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from turnwise_megatron.config import MegatronConfig
from turnwise_megatron.model import Model


class Optimizer:
    """`ddp` wraps the model and keeps fp32 gradients; `masters` are the tensors that AdamW moves here, fp32."""

    def __init__(self, model: Model, config: MegatronConfig, weight_decay: float, extra: Mapping[str, Any]) -> None:
        distributed, dtype = config.use_distributed_optimizer, model.config.params_dtype
        # engine_args may hold fields of either class; arguments.problems has refused all others.
        buffers = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
        settings = {field.name for field in dataclasses.fields(OptimizerConfig)}
        self.weight_decay = weight_decay
        self.ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=distributed,
                **{k: v for k, v in extra.items() if k in buffers},
            ),
            model,
        )
        # The schedule finds both here: gradients are exchanged once, after the last micro-batch.
        model.config.no_sync_func = self.ddp.no_sync
        # Without it the schedules would leave every rank with its own gradients.
        model.config.finalize_model_grads_func = _finalize
        options = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            weight_decay=weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            **{k: v for k, v in extra.items() if k in settings},
        )
        # Of packages that this strategy does not use (see parallel.import_megatron).
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.megatron = get_megatron_optimizer(options, [self.ddp], use_gloo_process_groups=False)

    @property
    def adams(self) -> list[Any]:
        """The AdamW of this rank (none where it holds no parameter)."""
        return [each.optimizer for each in self.megatron.chained_optimizers if each.optimizer is not None]

    @property
    def masters(self) -> list[Tensor]:
        """In an order that is the same in every run of one layout."""
        return [parameter for adam in self.adams for group in adam.param_groups for parameter in group["params"]]

    @property
    def expert(self) -> list[bool]:
        """Which of the masters are those of experts that are shared out among ranks."""
        return [
            bool(group["is_expert_parallel"])
            for adam in self.adams
            for group in adam.param_groups
            for _ in group["params"]
        ]

    @property
    def gradients(self) -> list[Tensor]:
        """The memory of all gradients here."""
        return [buffer.grad_data for buffer in (*self.ddp.buffers, *self.ddp.expert_parallel_buffers)]

    def clear(self) -> None:
        """Gradients of zero."""
        self.ddp.zero_grad_buffer()
        self.megatron.zero_grad()

    def clip(self, max_norm: float) -> float:
        """The norm of all gradients over all ranks; they are scaled down to `max_norm` (0: never). May be NaN or
        infinite."""
        # Copies the buffers' gradients to the masters, of which the norm is taken and which are clipped.
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if max_norm > 0:
            for each in self.megatron.chained_optimizers:
                clip_grad_by_total_norm_fp32(each.get_parameters(), max_norm, norm)
        return norm

    def step(self, lr: float) -> None:
        """One update of the clipped gradients at this rate, and the new weights on every rank."""
        for group in self.megatron.param_groups:
            group["lr"] = lr
            # Megatron leaves this to its scheduler.
            group["weight_decay"] = self.weight_decay * group["wd_mult"]
        # Not `step`, which prepares the gradients again, over what was clipped.
        self.megatron.step_with_ready_grads()


def _finalize(model: Any, _: Tensor | None, **options: Any) -> None:
    """Megatron's reductions, without its division by the number of tokens: coefficients hold the denominator."""
    finalize_model_grads(model, None, **options)
