"""What every strategy on a Hugging Face model shares: log-probs, values, an update from its micro-batches to its step,
offers, exports."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.contracts.train import Offer, TrainContext
from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.errors import TrainerError
from turnwise_torch import lora, models, passes
from turnwise_torch.device import gpu_memory
from turnwise_torch.experts import to_checkpoint
from turnwise_torch.export import write_model
from turnwise_torch.feed import Feed
from turnwise_torch.guard import Savings, names_out_of_memory, out_of_memory_named
from turnwise_torch.head import token_log_probs, token_values
from turnwise_torch.microbatch import MicroBatch
from turnwise_torch.objective import build_loss, column_tensors, objective_columns, policy_objective, value_objective
from turnwise_torch.ranks import ProcessGroup
from turnwise_torch.runner import Answer, Runner
from turnwise_torch.sending import Sending


class ModelStrategy(ABC):
    """One process of a training role. A subclass builds `model` and `runner` in its constructor and fills the hooks
    below.

    `group` is the process group of the role. All ranks go through the same number of micro-batches, whose collectives
    must meet: a rank with fewer adds micro-batches of coefficient zero.
    """

    savings = Savings(
        recompute="{role}.model_args.disable_gradient_checkpointing: false",
        spread="fsdp: {{cpu_offload: true}} in {role}.strategy_args.strategy_config (with several devices)",
    )
    logits_chunk = 0
    config: Any
    model: nn.Module
    runner: Runner

    def __init__(self, context: TrainContext, device: torch.device) -> None:
        self.context, self.device = context, device
        self.group = ProcessGroup(context.ranks, device, context.runtime_timeout)
        # A value head has a loss of its own, and a frozen role none.
        self.loss = (
            build_loss(context.objective) if context.trainable and context.head == "lm" and context.objective else None
        )
        self.feed = Feed(context, device)
        self.sending = Sending(context, device, self)

    @staticmethod
    def transports(config: Any, context: TrainContext) -> tuple[str, ...]:
        """Those by which a language model's weights leave; a critic or a value head offers none."""
        return ("shared_memory", "process_group", "safetensors") if context.head == "lm" else ()

    # ---------------------------------------------------------------- what a subclass fills in

    @abstractmethod
    def _optimize(self, lr: float) -> float:
        """The norm of the gradient over all ranks, which is scaled down to `max_grad_norm` (0: never) and used for one
        step at this rate. With a norm that is not finite no rank makes a step."""

    @abstractmethod
    def _clear(self) -> None:
        """Drop all gradients; called after every update, also a failed one."""

    def _whole(self, tensor: Tensor) -> Tensor:
        """The whole of a parameter of which every rank holds a part; all ranks call it for the same one."""
        return tensor

    def _exclusive(self) -> AbstractContextManager[object]:
        """Held while weights change."""
        return contextlib.nullcontext()

    def _vocabulary(self) -> int:
        """How many ids the model knows."""
        return models.vocabulary(self.model)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in the compute dtype as checkpoints have them (experts one by one), adapters added, tied ones
        under every name; all ranks iterate, rank 0's tensors count."""
        # Checkpoints of a critic hold its backbone under the names of a model without a head; the value head has a file
        # of its own.
        backbone = self.model.backbone if isinstance(self.model, models.ValueModel) else self.model
        yield from to_checkpoint(
            backbone, lora.whole_tensors(backbone, self._whole, models.torch_dtype(self.context.dtype))
        )

    def adapter_config(self) -> dict[str, Any]:
        """PEFT's configuration of the adapters."""
        return lora.peft_config(self.model, self.context.model)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters' whole tensors under the names of PEFT's files; all ranks iterate."""
        return lora.each_adapter(self.model, self._whole)

    # ---------------------------------------------------------------- the contract

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size): every process sees rows of its own."""
        return self.context.ranks.rank, self.context.ranks.size

    def logprobs(self, rows: Rows) -> np.ndarray:
        """float32 [R]: log_softmax(logits / temperature) of every sampled token."""
        if self.context.head != "lm":
            raise TrainerError(f"{self.context.role} has a value head and gives no log-probs")
        return self._infer("log-probs", rows, lambda batch: self._log_probs(batch)[0])

    def base_logprobs(self, rows: Rows) -> np.ndarray:
        """float32 [R]: `logprobs` with the adapters off, those of the model that training began with."""
        # A sampler may share this very module, and would decode without adapters meanwhile.
        with self._exclusive(), lora.adapters_off(self.model):
            return self.logprobs(rows)

    def values(self, rows: Rows) -> np.ndarray:
        """float32 [R]: the value of the prefix before every sampled token."""
        if self.context.head != "value":
            raise TrainerError(f"{self.context.role} has no value head. Fix: build it with head: value")
        return self._infer("values", rows, self._values)

    @names_out_of_memory("the update", "update")
    def update(self, update: Update) -> UpdateResult:
        """One optimizer step on Σ coef·loss; without a token of non-zero coef on any rank, none, and none where the
        loss or the gradient is not finite on one of them. Raises TrainerError."""
        if not self.context.trainable:
            raise TrainerError(f"{self.context.role} is not trainable: it was built without an optimizer")
        columns = objective_columns(update)
        # Asked of all ranks: one that returned by itself would leave the others waiting in their collectives.
        if not self.group.largest(int(np.any(columns["coef"])))[0]:
            return UpdateResult(loss=0.0, grad_norm=0.0)
        self.feed.check(update.rows, self._vocabulary())
        try:
            loss, sums = passes.accumulate(self.feed, self.runner, update, columns, partial(self._terms, update))
            # A rank's own loss says whether its gradient is sound: no rank may step where one of them is not.
            norm = self._optimize(update.lr) if self._finite(loss) else math.nan
        finally:
            # What a failed update has summed would be added to the next one's gradient.
            self._clear()
        skipped = not math.isfinite(norm)
        return UpdateResult(
            loss=loss, grad_norm=norm, sums={**({} if skipped else sums), **gpu_memory(self.device)}, skipped=skipped
        )

    @names_out_of_memory("the offer of weights", "send")
    def offer(self, transport: str, version: int, receivers: int = 1) -> Offer:
        """`shared_memory`, `process_group`: the payload of a sender of turnwise_torch.stream or .broadcast, served by
        `send`; `safetensors`:
        {"folder"} in Hugging Face layout (of adapters alone in PEFT's), valid until the next offer."""
        if transport not in (known := self.transports(self.config, self.context)):
            raise TrainerError(
                f"{self.context.role} has no transport {transport!r}. It has: {', '.join(known) or 'none'}"
            )
        return self.sending.offer(transport, version, receivers)

    @names_out_of_memory("the sending of weights", "send")
    def send(self, offer: Offer) -> None:
        """Stream the weights of a `shared_memory` or `process_group` offer; other offers are read by the backend."""
        self.sending.send(offer)

    @names_out_of_memory("the export", "hold")
    def export(self, folder: Path) -> None:
        """Weights in the compute dtype with config and tokenizer, in Hugging Face layout, written by rank 0. Raises
        CheckpointError.

        Adapters are added to the weights, and also written as they are, by PEFT's names, to the folder `adapter` in
        it."""
        # Each of these gathers over the ranks: all go through them before rank 0 writes by itself.
        value = self.model.value_head.named_parameters() if isinstance(self.model, models.ValueModel) else ()
        head = {
            name: self._whole(p).detach().to(models.torch_dtype(self.context.dtype)).contiguous() for name, p in value
        }
        adapters = dict(self.adapter_weights())
        weights = self.weights()
        try:
            if self.context.ranks.rank == 0:
                write_model(Path(folder), self.context.model, self.model, weights, head, adapters)
        finally:
            # The other ranks gather on: their collectives must meet.
            for _ in weights:
                pass

    def close(self) -> None:
        """Withdraw what is on offer, leave the process group; may be called twice."""
        self.sending.close()
        self.group.close()

    # ---------------------------------------------------------------- micro-batches

    def _infer(self, phase: str, rows: Rows, compute: Callable[[MicroBatch], Tensor]) -> np.ndarray:
        self.feed.check(rows, self._vocabulary())
        with out_of_memory_named(phase, self.context.role, "infer", self.savings):
            return passes.infer(self.feed, self.runner, rows, compute)

    def _terms(self, update: Update, batch: MicroBatch, columns: Mapping[str, np.ndarray]) -> Answer:
        objective = self.context.objective
        assert objective is not None
        if self.context.head == "value":
            values = self._values(batch)
            return value_objective(values, column_tensors(columns, batch.responses, values), objective.value_clip)
        assert self.loss is not None
        # The entropy's graph doubles what a chunk of logits needs: without a bonus it is a metric and carries no
        # gradient.
        log_probs, entropy = self._log_probs(
            batch, entropy=objective.entropy or update.entropy_coef != 0, entropy_gradient=update.entropy_coef != 0
        )
        tensors = column_tensors(columns, batch.responses, log_probs)
        return policy_objective(log_probs, entropy, tensors, self.loss, objective, update.entropy_coef, update.kl_coef)

    def _log_probs(
        self, batch: MicroBatch, entropy: bool = False, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [r] of a micro-batch's targets and, if asked for, entropies [r]."""
        return token_log_probs(
            self.model,
            batch,
            self.context.temperature,
            chunk=self.logits_chunk,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
        )

    def _values(self, batch: MicroBatch) -> Tensor:
        """Values [r] of the prefixes before a micro-batch's targets."""
        assert isinstance(self.model, models.ValueModel)
        return token_values(self.model, batch)

    def _finite(self, number: float) -> bool:
        """Whether it is, on every rank."""
        return not self.group.largest(int(not math.isfinite(number)))[0]
