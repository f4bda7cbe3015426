"""The strategy `deepspeed`: a transformers model under DeepSpeed's engine, ZeRO stages 0 to 3, on one and more
processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from turnwise.contracts.train import TrainContext
from turnwise.errors import Problem, refuse
from turnwise_deepspeed import arguments, checkpoint, masters, memory
from turnwise_deepspeed.config import DeepspeedConfig
from turnwise_deepspeed.start import join
from turnwise_torch import lora, models
from turnwise_torch.checks import model_problems
from turnwise_torch.device import device_of
from turnwise_torch.guard import Savings, names_out_of_memory, out_of_memory_named
from turnwise_torch.microbatch import MicroBatch
from turnwise_torch.parked import ParkedStrategy
from turnwise_torch.ranks import limit_waits
from turnwise_torch.runner import OneByOne

T = TypeVar("T")


class Caller(nn.Module):
    """The model as DeepSpeed's engine sees it: one forward pass is any function that uses the model.

    So log-probs, whose head is called apart from the model, are one forward pass of the engine, and its hooks gather
    what they use."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *, compute: Callable[[], T]) -> T:
        """The result of `compute`."""
        return compute()


class DeepspeedStrategy(ParkedStrategy):
    """Actor, critic (`head: value`) or reference (`trainable: false`), one process of them (see
    turnwise.contracts.train)."""

    savings = Savings(
        ParkedStrategy.savings.recompute, "{role}.strategy_args.strategy_config: ${{deepspeed_zero3_cpuoffload}}"
    )

    def __init__(self, config: DeepspeedConfig | None, context: TrainContext) -> None:
        self.config = config or DeepspeedConfig()
        refuse(self.check(self.config, context))
        # For policy losses that draw random numbers.
        torch.manual_seed(context.seed + context.ranks.rank)
        super().__init__(context, device_of(context))
        self.stage = self.config.zero_stage
        self.logits_chunk = self.config.logits_chunk
        self.engine: Any = None
        self._norm = math.inf
        self.runner = OneByOne(self.group, self._backward)
        self._deepspeed = join(context.ranks, self.device)
        with out_of_memory_named("loading the model", context.role, "hold", self.savings):
            self.model = self._load_model()
            # Before `_start`, after which stage 3 shows parameters of shape [0].
            self._facts = checkpoint.facts(self.model, context, self.stage)
            # A frozen model needs DeepSpeed's engine only where it is sharded.
            if context.trainable or self.stage == 3:
                self._start()
            else:
                self.model.to(self.device)
        limit_waits(context.runtime_timeout)  # DeepSpeed's groups as well

    @staticmethod
    def check(config: DeepspeedConfig, context: TrainContext) -> list[Problem]:
        """What can be known before the model is loaded."""
        return [*arguments.problems(config, context), *model_problems(context, "deepspeed")]

    # ---------------------------------------------------------------- building

    def _load_model(self) -> nn.Module:
        """The whole model on the CPU: a trained one in fp32, from which the masters start, any other in the compute
        dtype."""
        context = self.context
        load = models.load_causal_lm if context.head == "lm" else models.load_value_model
        model = load(
            context.model,
            "fp32" if context.trainable else context.dtype,
            context.attn_implementation,
            context.trust_remote_code,
        )
        if context.head == "lm":
            models.check_head(model)
        if context.use_sequence_packing:
            models.check_packing(model)
        lora.choose_trained(model, context)
        # Written while parameters are whole: stage 3 leaves nothing of them to copy into.
        # In place of PEFT's own values, which depend on the global random state.
        adapters = dict(model.named_parameters())
        for name, value in lora.initial_values(model, context.seed).items():
            adapters[name].data.copy_(value)
        if context.trainable and context.gradient_checkpointing:
            models.enable_gradient_checkpointing(model)
        return model

    def _start(self) -> None:
        settings = arguments.engine_config(self.config, self.context)
        # Taken before the rounding, so that masters start from what the folder holds.
        starts = masters.starting_values(self.model)
        masters.round_to(self.model, models.torch_dtype(self.context.dtype))
        optimizer = (
            masters.build_optimizer(self._deepspeed, self.model, self.config, self.context.weight_decay)
            if starts
            else None
        )
        caller = Caller(self.model)
        # One parameter after the other: the whole model is never on the device.
        if self.stage == 3:
            self._deepspeed.zero.Init(
                module=caller, config_dict_or_path=settings, dtype=models.torch_dtype(self.context.dtype)
            )
        self.engine = self._deepspeed.initialize(model=caller, optimizer=optimizer, config=settings)[0]
        # Without dropout: old and new log-probs of unchanged weights have to be equal.
        self.engine.eval()
        if self.context.dtype == "bf16":
            masters.set_masters(self._deepspeed, self.engine, self.stage, starts)
        # Stage 0 in fp32: DeepSpeed gives no norm, and steps with any gradient.
        if optimizer is not None and self.engine.optimizer is optimizer:
            optimizer.register_step_pre_hook(lambda *_: self._clip_ourselves())

    # ---------------------------------------------------------------- one forward pass of the engine

    def _log_probs(
        self, batch: MicroBatch, entropy: bool = False, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return self._forward(partial(super()._log_probs, batch, entropy, entropy_gradient))

    def _values(self, batch: MicroBatch) -> Tensor:
        return self._forward(partial(super()._values, batch))

    def _forward(self, compute: Callable[[], T]) -> T:
        return compute() if self.engine is None else self.engine(compute=compute)

    # ---------------------------------------------------------------- the update

    def _backward(self, loss: Tensor, last: bool) -> None:
        """DeepSpeed takes the mean over ranks, the objective is a sum."""
        # One call for each micro-batch, and one `step` for all: coefficients hold the denominator, so nothing may be
        # divided by a number of micro-batches (scale_wrt_gas).
        self.engine.backward(loss * self.context.ranks.size, scale_wrt_gas=False)

    def _optimize(self, lr: float) -> float:
        """DeepSpeed exchanges gradients, measures, clips and moves the weights in one call, or finds a norm that is not
        finite and moves nothing; in which case it gives no norm."""
        # The schedule is the pipeline's: DeepSpeed was given none, and optimizers start at rate 0.
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        # Stage 0 in fp32: torch's optimizer as it is, for which DeepSpeed has no norm; the hook of `_start` took it.
        if self.engine.optimizer is self.engine.basic_optimizer:
            return self._norm
        # A stage with an optimizer of DeepSpeed's own finds an overflow itself and then skips the step.
        return float(self.engine.get_global_grad_norm()) if self.engine.was_step_applied() else math.inf

    def _clip_ourselves(self) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._norm = float(nn.utils.clip_grad_norm_(parameters, self.context.max_grad_norm or math.inf))
        if not math.isfinite(self._norm):
            # A parameter without a gradient is not stepped.
            self.engine.zero_grad()

    def _clear(self) -> None:
        masters.drop_gradients(self.engine)

    def _whole(self, tensor: Tensor) -> Tensor:
        if not hasattr(tensor, "ds_id"):
            return tensor
        with self._deepspeed.zero.GatheredParameters([tensor]):
            # Keeps the gathered storage when the parameter lets go of it.
            return tensor.detach()

    # ---------------------------------------------------------------- state

    @names_out_of_memory("the checkpoint", "hold")
    def save(self, folder: Path) -> None:
        """This process's part: DeepSpeed's checkpoint and random state. Raises CheckpointError."""
        checkpoint.save(Path(folder), self.engine, self.context, self._facts, self.device)

    @names_out_of_memory("resuming", "hold")
    def load(self, folder: Path) -> None:
        """Undo `save`, exactly. Raises CheckpointError: also for a state of another stage or number of processes."""
        checkpoint.load(Path(folder), self.engine, self.context, self._facts, self.device)

    def _movable(self) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        dropped = []
        if self.context.trainable:
            masters.drop_gradients(self.engine)
            dropped = memory.gradients(self.engine, self.device)
        # After the gradients are dropped: what they held needs no copy in main memory.
        return memory.states(self.model, self.engine, self.device), dropped

    def close(self) -> None:
        """Withdraw what is on offer, take DeepSpeed's hooks off, leave the process group; may be called twice."""
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
        super().close()
