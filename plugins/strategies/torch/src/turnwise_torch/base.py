"""What every strategy on a Hugging Face model shares: log-probs, values, the micro-batches of an update, offers, exports."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from attrs import evolve
from safetensors import SafetensorError
from torch import Tensor, nn

from turnwise.contracts.train import Offer, TrainContext
from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.errors import ConfigError, TrainerError
from turnwise_torch import lora, models
from turnwise_torch.broadcast import Broadcast, Hub
from turnwise_torch.experts import to_checkpoint
from turnwise_torch.export import remove, write_model
from turnwise_torch.guard import Savings, out_of_memory_told, tells_out_of_memory
from turnwise_torch.head import token_log_probs, token_values
from turnwise_torch.microbatch import Layout, MicroBatch, padding
from turnwise_torch.objective import Sums, build_loss, column_tensors, objective_columns, policy_objective, value_objective
from turnwise_torch.packing import varlen
from turnwise_torch.ranks import ProcessGroup
from turnwise_torch.stream import Sender, buckets
from turnwise_torch.vision import Vision, has_vision


class ModelStrategy:
    """One process of a training role. A subclass builds `model` (and what steps it) in its constructor and fills the hooks below.

    `group` is the process group of the role. All ranks go through the same number of micro-batches, whose collectives must meet: a rank
    with fewer adds micro-batches of coefficient zero.
    """

    transports: tuple[str, ...] = ("shared_memory", "process_group", "safetensors")
    adapters = True
    savings = Savings(
        recompute="{role}.model_args.disable_gradient_checkpointing: false",
        spread="fsdp: {{cpu_offload: true}} in {role}.strategy_args.strategy_config (with several devices)",
    )
    logits_chunk = 0
    model: nn.Module

    def __init__(self, context: TrainContext, device: torch.device) -> None:
        self.context, self.device = context, device
        if context.head != "lm":
            self.transports = ()
        self.group = ProcessGroup(context.ranks, device, context.runtime_timeout)
        self.loss = build_loss(context.objective) if context.trainable and context.head == "lm" and context.objective else None
        self.vision = Vision(context.model) if has_vision(context.model) else None
        if self.vision is not None and context.use_sequence_packing:
            raise ConfigError(f"{context.role}.use_sequence_packing: a vision-language model is not packed. Fix: use_sequence_packing: false")
        self._updates = 0
        self._sender: Sender | Broadcast | None = None
        self._hub: Hub | None = None
        self._folder: Path | None = None

    # ---------------------------------------------------------------- what a subclass fills in

    def _backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of one micro-batch; `last`: no further one follows in this update, so that ranks may exchange theirs."""
        raise NotImplementedError

    def _clip(self) -> float:
        """The gradient norm over all ranks, and gradients scaled down to `max_grad_norm` (0: never)."""
        raise NotImplementedError

    def _step(self, lr: float) -> None:
        """The optimizer's step on the clipped gradients."""
        raise NotImplementedError

    def _clear(self) -> None:
        """Drop all gradients; called after every update, also a failed one."""
        raise NotImplementedError

    def _whole(self, tensor: Tensor) -> Tensor:
        """The whole of a parameter of which every rank holds a part; all ranks call it for the same one."""
        return tensor

    def _exclusive(self) -> AbstractContextManager[object]:
        """Held while weights change."""
        return contextlib.nullcontext()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in the compute dtype as checkpoints have them (experts one by one), adapters added, tied ones under every name; all
        ranks iterate, rank 0's tensors count."""
        backbone = self.model.backbone if isinstance(self.model, models.ValueModel) else self.model
        yield from to_checkpoint(backbone, lora.whole_tensors(backbone, self._whole, models.torch_dtype(self.context.dtype)))

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
        with self._exclusive(), lora.adapters_off(self.model):
            return self.logprobs(rows)

    def values(self, rows: Rows) -> np.ndarray:
        """float32 [R]: the value of the prefix before every sampled token."""
        if self.context.head != "value":
            raise TrainerError(f"{self.context.role} has no value head. Fix: build it with head: value")
        return self._infer("values", rows, self._values)

    @tells_out_of_memory("the update", "update")
    def update(self, update: Update) -> UpdateResult:
        """One optimizer step on Σ coef·loss; without a token of non-zero coef on any rank, none. Raises TrainerError."""
        if not self.context.trainable:
            raise TrainerError(f"{self.context.role} is not trainable: it was built without an optimizer")
        self._updates += 1
        columns = objective_columns(update)
        if not self.group.largest(int(np.any(columns["coef"])))[0]:
            return UpdateResult(loss=0.0, grad_norm=0.0)
        self._check_rows(update.rows)
        try:
            loss, sums = self._accumulate(update, columns)
            norm = self._clip()
            if self.group.largest(int(not (math.isfinite(loss) and math.isfinite(norm))))[0]:
                raise TrainerError(
                    f"update {self._updates} of {self.context.role} has loss {loss} and gradient norm {norm} "
                    f"({len(columns['coef'])} response tokens, learning rate {update.lr:g}); no step was made. "
                    "Fix: a lower learning_rate or max_grad_norm, or dtype fp32"
                )
            with self._exclusive():
                self._step(update.lr)
        finally:
            self._clear()
        return UpdateResult(loss=loss, grad_norm=norm, sums={**sums, **gpu_memory(self.device)})

    def _accumulate(self, update: Update, columns: Mapping[str, np.ndarray]) -> tuple[float, dict[str, tuple[float, float]]]:
        """The gradient of the objective over all micro-batches; its value and the metric sums, of this rank's rows."""
        context, layout = self.context, Layout(update.rows)
        wanted = (columns["coef"] != 0) | (columns["weight"] != 0)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        sums: Sums = {}
        groups = self._groups(layout, context.per_device_train_batch_size, context.max_tokens_per_microbatch_in_train, wanted)
        count = self.group.largest(len(groups))[0]
        for number in range(count):
            if number < len(groups):
                loss, metrics = self._terms(self._batch(layout, groups[number]), columns, update)
            else:
                filler = {name: np.zeros((1, *column.shape[1:]), column.dtype) for name, column in columns.items()}
                loss, metrics = self._terms(self._beside(padding(self.device)), filler, update)
            self._backward(loss, number == count - 1)
            total += loss.detach()
            for name, (x, w) in metrics.items():
                before = sums.get(name)
                sums[name] = (x, w) if before is None else (before[0] + x, before[1] + w)
        return float(total), {name: (float(x), float(w)) for name, (x, w) in sums.items()}

    def _terms(self, batch: MicroBatch, columns: Mapping[str, np.ndarray], update: Update) -> tuple[Tensor, Sums]:
        objective = self.context.objective
        assert objective is not None
        if self.context.head == "value":
            values = self._values(batch)
            return value_objective(values, column_tensors(columns, batch.responses, values), objective.value_clip)
        assert self.loss is not None
        log_probs, entropy = self._log_probs(batch, entropy=objective.entropy or update.entropy_coef != 0, entropy_gradient=update.entropy_coef != 0)
        tensors = column_tensors(columns, batch.responses, log_probs)
        return policy_objective(log_probs, entropy, tensors, self.loss, objective, update.entropy_coef, update.kl_coef)

    def _log_probs(self, batch: MicroBatch, entropy: bool = False, entropy_gradient: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs [r] of a micro-batch's targets and, if asked for, entropies [r]."""
        return token_log_probs(
            self.model, batch, self.context.temperature, chunk=self.logits_chunk, entropy=entropy, entropy_gradient=entropy_gradient
        )

    def _values(self, batch: MicroBatch) -> Tensor:
        """Values [r] of the prefixes before a micro-batch's targets."""
        assert isinstance(self.model, models.ValueModel)
        return token_values(self.model, batch)

    @tells_out_of_memory("the offer of weights", "send")
    def offer(self, transport: str, version: int, receivers: int = 1) -> Offer:
        """`shared_memory`, `process_group`: the payload of a sender of turnwise_torch.stream or .broadcast, served by `send`; `safetensors`:
        {"folder"} in Hugging Face layout (of adapters alone in PEFT's), valid until the next offer."""
        if transport not in self.transports:
            raise TrainerError(f"{self.context.role} has no transport {transport!r}. It has: {', '.join(self.transports) or 'none'}")
        self._withdraw()
        first = self.context.ranks.rank == 0
        alone = self.context.trainable and self.context.lora is not None and self.context.lora.sync == "adapter"
        adapter = lora.peft_config(self.model, self.context.model) if alone else None
        if transport in ("shared_memory", "process_group"):
            self._sender = self._new_sender(transport, receivers) if first else None
            return Offer(transport, version, self._sender.payload if self._sender else {}, adapter)
        tensors = lora.adapter_tensors(self.model, self._whole) if adapter else {}  # on all ranks, before one can fail
        previous, self._folder = self._folder, Path(tempfile.mkdtemp(prefix="turnwise-weights-")) if first else None
        try:
            if adapter is None:
                self.export(self._folder or Path())
            elif self._folder is not None:
                lora.write_adapter(self._folder, adapter, tensors)
        except (OSError, SafetensorError) as error:
            raise TrainerError(f"weight update: cannot write the adapters to {self._folder}: {models.first_line(error)}") from error
        finally:
            remove(previous)
        return Offer(transport, version, {"folder": str(self._folder)}, adapter)

    @tells_out_of_memory("the sending of weights", "send")
    def send(self, offer: Offer) -> None:
        """Stream the weights of a `shared_memory` or `process_group` offer in buckets of `bucket_bytes`; other offers are read by the backend."""
        if offer.transport not in ("shared_memory", "process_group"):
            return
        weights = self.weights() if offer.adapter is None else lora.each_adapter(self.model, self._whole)
        try:
            if self.context.ranks.rank == 0:
                if self._sender is None:
                    raise TrainerError(f"{self.context.role} was asked to send version {offer.version}, which it does not offer")
                self._sender.send(buckets(weights, self.context.bucket_bytes))
        finally:
            for _ in weights:  # the other ranks gather on: their collectives must meet
                pass
            self._withdraw()

    @tells_out_of_memory("the export", "hold")
    def export(self, folder: Path) -> None:
        """Weights in the compute dtype with config and tokenizer, in Hugging Face layout, written by rank 0. Raises CheckpointError.

        Adapters are added to the weights, and also written as they are, by PEFT's names, to the folder `adapter` in it."""
        value = self.model.value_head.named_parameters() if isinstance(self.model, models.ValueModel) else ()
        head = {name: self._whole(p).detach().to(models.torch_dtype(self.context.dtype)).contiguous() for name, p in value}
        adapters = lora.adapter_tensors(self.model, self._whole)
        weights = self.weights()
        try:
            if self.context.ranks.rank == 0:
                write_model(Path(folder), self.context.model, self.model, weights, head, adapters)
        finally:
            for _ in weights:  # the other ranks gather on: their collectives must meet
                pass

    def close(self) -> None:
        """Withdraw what is on offer, leave the process group; may be called twice."""
        self._withdraw()
        if self._hub is not None:
            self._hub.close()
        remove(self._folder)
        self._folder = None
        self.group.close()

    def _new_sender(self, transport: str, receivers: int) -> Sender | Broadcast:
        if transport == "shared_memory":
            return Sender(receivers, self.context.weight_sync_timeout)
        if self._hub is None:
            self._hub = Hub(self.context.ranks.address, self.device, self.context.weight_sync_timeout)
        return self._hub.sender(receivers)

    def _withdraw(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    # ---------------------------------------------------------------- micro-batches

    def _infer(self, phase: str, rows: Rows, compute: Callable[[MicroBatch], Tensor]) -> np.ndarray:
        self._check_rows(rows)
        layout = Layout(rows)
        out = np.zeros(len(layout.position), np.float32)
        groups = self._groups(layout, self.context.infer_batch_size, self.context.max_tokens_per_microbatch_in_infer)
        more = self.group.largest(len(groups))[0] - len(groups)
        with out_of_memory_told(phase, self.context.role, "infer", self.savings), torch.no_grad():
            for group in groups:
                batch = self._batch(layout, group)
                out[batch.responses] = compute(batch).float().cpu().numpy()
            for _ in range(more):
                compute(self._beside(padding(self.device)))
        return out

    def _groups(self, layout: Layout, rows: int, budget: int | None, wanted: np.ndarray | None = None) -> list[list[np.ndarray]]:
        """The rows of every micro-batch, each the indices of the samples in it."""
        if self.context.use_sequence_packing:
            assert budget is not None
            return list(layout.pack(budget, wanted, one_row=varlen(self.context.attn_implementation)))
        return [[samples[i : i + 1] for i in range(len(samples))] for samples in layout.cut(rows, budget, wanted)]

    def _batch(self, layout: Layout, group: list[np.ndarray]) -> MicroBatch:
        batch = layout.packed_batch(group, self.device)
        if self.vision is None or not layout.rows.images:
            return self._beside(batch)
        images: list[np.ndarray] = []
        mask = np.zeros(tuple(batch.input_ids.shape), np.bool_)
        for place, sample in enumerate(np.concatenate(group)):  # one sample a row: nothing is packed
            row, length = layout.rows.select(np.array([sample])), layout.needed[sample]
            mask[place, :length], found = self.vision.find(row.input_ids[:length], row.images[0])
            images += found
        pixels = self.vision.pixels(images, self.device)
        return self._beside(batch) if pixels is None else evolve(batch, pixels=pixels, image_mask=torch.from_numpy(mask).to(self.device))

    def _beside(self, batch: MicroBatch) -> MicroBatch:
        """A micro-batch of text alone; where other ranks may run the vision tower this one does too, for their collectives must meet."""
        return batch if self.vision is None or self.context.ranks.size == 1 else evolve(batch, beside=self.vision.blank(self.device))

    def _check_rows(self, rows: Rows) -> None:
        if rows.images and self.vision is None:
            raise TrainerError(f"{self.context.role} received images, its model takes text alone")
        size = models.vocabulary(self.model)
        if len(rows.input_ids) and not 0 <= int(rows.input_ids.min()) <= int(rows.input_ids.max()) < size:
            worst = int(rows.input_ids.max()) if rows.input_ids.max() >= size else int(rows.input_ids.min())
            raise TrainerError(f"{self.context.role} received the token id {worst}, its model has ids 0 to {size - 1}")


def gpu_memory(device: torch.device) -> dict[str, tuple[float, float]]:
    """The metric `system/gpu_memory`, as a sum: the most GiB that torch has held on the device so far; nothing on a CPU."""
    return {"system/gpu_memory": (torch.cuda.max_memory_allocated(device) / 2**30, 1.0)} if device.type == "cuda" else {}


def device_of(context: TrainContext) -> torch.device:
    """The process's GPU if it has one and CUDA works here, else the CPU."""
    return torch.device("cuda", context.devices[0]) if context.devices and torch.cuda.is_available() else torch.device("cpu")
