"""The strategy `torch`: one process, one device, one optimizer step per update."""

from __future__ import annotations

import importlib.util
import math
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from turnwise.contracts.train import Offer, TrainContext
from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.errors import CheckpointError, ConfigError, TrainerError
from turnwise_torch import models, shared
from turnwise_torch.config import TorchConfig
from turnwise_torch.guard import out_of_memory_told
from turnwise_torch.head import token_log_probs, token_values
from turnwise_torch.microbatch import Layout, MicroBatch
from turnwise_torch.objective import Sums, build_loss, column_tensors, kl_estimator, objective_columns, policy_objective, value_objective
from turnwise_torch.optimizer import MasterAdamW
from turnwise_torch.packing import DENSE, varlen
from turnwise_torch.state import read_state, write_state

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")


class TorchStrategy:
    """Actor, critic (`head: value`) or reference (`trainable: false`) in this process (see turnwise.contracts.train)."""

    transports: tuple[str, ...] = ("shared", "safetensors")

    def __init__(self, config: TorchConfig | None, context: TrainContext) -> None:
        self.config = config or TorchConfig()
        self.context = context
        problems = self.check(self.config, context)
        if problems:
            raise ConfigError([line.removeprefix("machine: ") for line in problems])
        torch.manual_seed(context.seed)  # for policy losses that draw random numbers; nothing here does
        self.device = device_of(context)
        if context.head != "lm":
            self.transports = ()
        with out_of_memory_told("loading the model", context.role, train=False):
            self.model = self._load_model(context.dtype).to(self.device)
            if context.head == "lm":
                models.check_head(self.model)
            if context.use_sequence_packing:
                models.check_packing(self.model)
            self.model.requires_grad_(context.trainable)
            self.optimizer = self._build_optimizer() if context.trainable else None
        if context.trainable and context.gradient_checkpointing:
            models.enable_gradient_checkpointing(self.model)
        self.loss = build_loss(context.objective) if context.trainable and context.head == "lm" and context.objective else None
        self._updates = 0
        self._key: str | None = None
        self._folder: Path | None = None

    @staticmethod
    def check(config: TorchConfig, context: TrainContext) -> list[str]:
        """What can be known before the model is loaded: one line per problem, `machine: …` for what only this machine lacks."""
        role, problems = context.role, []
        if len(context.devices) > 1:
            problems.append(
                f"{role}.device_mapping names {len(context.devices)} devices, strategy torch uses one. Fix: name one, or use a distributed strategy"
            )
        if context.trainable and context.dtype == "fp16":
            problems.append(f"{role}.model_args.dtype: fp16 cannot be trained by strategy torch, which scales no losses. Fix: bf16 or fp32")
        if context.temperature <= 0:
            problems.append(f"{role} needs a sampling temperature over 0 (log-probs are of logits / temperature), got {context.temperature}")
        if context.attn_implementation.startswith("flash_attention"):
            if importlib.util.find_spec("flash_attn") is None:
                problems.append(
                    f"machine: {role}.model_args.attn_implementation: {context.attn_implementation} needs the package flash_attn. Fix: sdpa"
                )
            if context.dtype == "fp32":
                problems.append(f"{role}.model_args.attn_implementation: {context.attn_implementation} needs dtype bf16 or fp16. Fix: sdpa")
        if context.use_sequence_packing:
            if not varlen(context.attn_implementation) and context.attn_implementation not in DENSE:
                problems.append(
                    f"{role}.use_sequence_packing: {context.attn_implementation} is not packed by strategy torch. "
                    f"Fix: model_args.attn_implementation: sdpa, or use_sequence_packing: false"
                )
            if None in (context.max_tokens_per_microbatch_in_train, context.max_tokens_per_microbatch_in_infer):
                problems.append(f"{role}.use_sequence_packing needs both token budgets")
        if context.trainable and context.objective is None:
            problems.append(f"{role} is trainable but has no objective")
        elif context.objective is not None:
            try:
                kl_estimator(context.objective.kl_loss_type)
            except ValueError as error:
                problems.append(f"kl_loss_type: {error}")
        return problems

    def logprobs(self, rows: Rows) -> np.ndarray:
        """float32 [R]: log_softmax(logits / temperature) of every sampled token."""
        if self.context.head != "lm":
            raise TrainerError(f"{self.context.role} has a value head and gives no log-probs")
        return self._infer(
            "log-probs", rows, lambda batch: token_log_probs(self.model, batch, self.context.temperature, chunk=self.config.logits_chunk)[0]
        )

    def values(self, rows: Rows) -> np.ndarray:
        """float32 [R]: the value of the prefix before every sampled token."""
        model = self.model
        if not isinstance(model, models.ValueModel):
            raise TrainerError(f"{self.context.role} has no value head. Fix: build it with head: value")
        return self._infer("values", rows, lambda batch: token_values(model, batch))

    def update(self, update: Update) -> UpdateResult:
        """One optimizer step on Σ coef·loss; without a token of non-zero coef, none. Raises TrainerError."""
        if self.optimizer is None:
            raise TrainerError(f"{self.context.role} is not trainable: it was built without an optimizer")
        self._updates += 1
        columns = objective_columns(update)
        if not np.any(columns["coef"]):
            return UpdateResult(loss=0.0, grad_norm=0.0)
        self._check_rows(update.rows)
        try:
            with out_of_memory_told("the update", self.context.role, train=True):
                loss, sums = self._backward(update, columns)
                norm = self.optimizer.clip(self.context.max_grad_norm)
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    raise TrainerError(
                        f"update {self._updates} of {self.context.role} has loss {loss} and gradient norm {norm} "
                        f"({len(columns['coef'])} response tokens, learning rate {update.lr:g}); no step was made. "
                        "Fix: a lower learning_rate or max_grad_norm, or dtype fp32"
                    )
                with self._exclusive():
                    self.optimizer.step(update.lr)
        finally:
            self.optimizer.clear()
        return UpdateResult(loss=loss, grad_norm=norm, sums={**sums, **gpu_memory(self.device)})

    def _backward(self, update: Update, columns: Mapping[str, np.ndarray]) -> tuple[float, dict[str, tuple[float, float]]]:
        """Accumulate the gradient of the objective over all micro-batches; its value and the metric sums."""
        assert self.optimizer is not None
        context, layout = self.context, Layout(update.rows)
        wanted = (columns["coef"] != 0) | (columns["weight"] != 0)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        sums: Sums = {}
        for batch in self._batches(layout, context.per_device_train_batch_size, context.max_tokens_per_microbatch_in_train, wanted):
            loss, metrics = self._terms(batch, columns, update)
            loss.backward()
            self.optimizer.accumulate()
            total += loss.detach()
            for name, (x, w) in metrics.items():
                before = sums.get(name)
                sums[name] = (x, w) if before is None else (before[0] + x, before[1] + w)
        return float(total), {name: (float(x), float(w)) for name, (x, w) in sums.items()}

    def _terms(self, batch: MicroBatch, columns: Mapping[str, np.ndarray], update: Update) -> tuple[Tensor, Sums]:
        objective = self.context.objective
        assert objective is not None
        if isinstance(self.model, models.ValueModel):
            values = token_values(self.model, batch)
            return value_objective(values, column_tensors(columns, batch.responses, values), objective.value_clip)
        assert self.loss is not None
        log_probs, entropy = token_log_probs(
            self.model,
            batch,
            self.context.temperature,
            chunk=self.config.logits_chunk,
            entropy=objective.entropy or update.entropy_coef != 0,
            entropy_gradient=update.entropy_coef != 0,
        )
        tensors = column_tensors(columns, batch.responses, log_probs)
        return policy_objective(log_probs, entropy, tensors, self.loss, objective, update.entropy_coef, update.kl_coef)

    def offer(self, transport: str, version: int) -> Offer:
        """`shared`: {"key"} for turnwise_torch.shared.lookup; `safetensors`: {"folder"} in Hugging Face layout, valid until the next offer."""
        if transport not in self.transports:
            raise TrainerError(f"{self.context.role} has no transport {transport!r}. It has: {', '.join(self.transports) or 'none'}")
        if transport == "shared":
            self._key = self._key or shared.publish(self.model)
            return Offer(transport, version, {"key": self._key})
        previous, self._folder = self._folder, Path(tempfile.mkdtemp(prefix="turnwise-weights-"))
        self.export(self._folder)
        _remove(previous)
        return Offer(transport, version, {"folder": str(self._folder)})

    def send(self, offer: Offer) -> None:
        """Nothing to stream: both transports are read by the backend."""

    def save(self, folder: Path) -> None:
        """Master weights, moments, random state and the number of updates, in one file in `folder`. Raises CheckpointError."""
        weights = self.optimizer.state() if self.optimizer else {f"master/{n}": p for n, p in self.model.named_parameters()}
        rng = {"rng/cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        write_state(folder, {**weights, **rng}, {**self._facts(), "updates": str(self._updates)})

    def load(self, folder: Path) -> None:
        """Undo `save`, in place and exactly. Raises CheckpointError."""
        tensors, facts = read_state(folder, self._facts())
        names = set(self.optimizer.masters) if self.optimizer else {n for n, _ in self.model.named_parameters()}
        found = {name.removeprefix("master/"): t.shape for name, t in tensors.items() if name.startswith("master/")}
        if found != {n: p.shape for n, p in self.model.named_parameters() if n in names}:
            raise CheckpointError(f"the training state in {folder} belongs to another model than {self.context.model}. Fix: the pretrain of that run")
        with self._exclusive(), torch.no_grad():
            if self.optimizer:
                self.optimizer.restore(tensors)
            else:
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(tensors[f"master/{name}"])
        torch.set_rng_state(tensors["rng/cpu"])
        if "rng/cuda" in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng/cuda"], self.device)
        self._updates = int(facts["updates"])

    def export(self, folder: Path) -> None:
        """Weights in the compute dtype with config and tokenizer, in Hugging Face layout. Raises CheckpointError."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in sorted(self.context.model.iterdir()):
                if file.is_file() and not any(file.match(pattern) for pattern in WEIGHT_FILES):
                    shutil.copyfile(file, folder / file.name)
            with models.quiet():
                whole = self.model.backbone if isinstance(self.model, models.ValueModel) else self.model
                whole.save_pretrained(folder)  # type: ignore[operator]
            if isinstance(self.model, models.ValueModel):
                save_file(dict(self.model.value_head.state_dict()), folder / models.VALUE_HEAD_FILE)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write the model to {folder}: {models.first_line(error)}") from error

    def offload(self) -> None:
        """Move model and optimizer to the CPU's memory."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        """Move them back."""
        self._move(self.device)

    def close(self) -> None:
        """Withdraw the shared model and remove what was written for a backend."""
        if self._key is not None:
            shared.withdraw(self._key)
            self._key = None
        _remove(self._folder)
        self._folder = None

    def _load_model(self, dtype: str) -> nn.Module:
        load = models.load_causal_lm if self.context.head == "lm" else models.load_value_model
        return load(self.context.model, dtype, self.context.attn_implementation)

    def _build_optimizer(self) -> MasterAdamW:
        # A 16-bit model is read a second time in fp32, so that the masters start from what the folder holds and not from rounded values.
        masters = dict(self._load_model("fp32").named_parameters()) if self.context.dtype == "bf16" else None
        named = self.model.named_parameters()
        return MasterAdamW(named, self.config.betas, self.config.eps, self.context.weight_decay, masters)

    def _infer(self, phase: str, rows: Rows, compute: Callable[[MicroBatch], Tensor]) -> np.ndarray:
        self._check_rows(rows)
        layout = Layout(rows)
        out = np.zeros(len(layout.position), np.float32)
        with out_of_memory_told(phase, self.context.role, train=False), torch.no_grad():
            for batch in self._batches(layout, self.context.infer_batch_size, self.context.max_tokens_per_microbatch_in_infer):
                out[batch.responses] = compute(batch).float().cpu().numpy()
        return out

    def _batches(self, layout: Layout, rows: int, budget: int | None, wanted: np.ndarray | None = None) -> Iterator[MicroBatch]:
        if self.context.use_sequence_packing:
            assert budget is not None
            for packed in layout.pack(budget, wanted, one_row=varlen(self.context.attn_implementation)):
                yield layout.packed_batch(packed, self.device)
        else:
            for samples in layout.cut(rows, budget, wanted):
                yield layout.micro_batch(samples, self.device)

    def _check_rows(self, rows: Rows) -> None:
        if rows.images:
            raise TrainerError(f"{self.context.role} received images, strategy torch trains text models")
        size = models.vocabulary(self.model)
        if len(rows.input_ids) and not 0 <= int(rows.input_ids.min()) <= int(rows.input_ids.max()) < size:
            worst = int(rows.input_ids.max()) if rows.input_ids.max() >= size else int(rows.input_ids.min())
            raise TrainerError(f"{self.context.role} received the token id {worst}, its model has ids 0 to {size - 1}")

    def _exclusive(self) -> threading.Lock:
        """The lock that keeps a sampler in this process from decoding with half-written weights."""
        return shared.lookup(self._key).lock if self._key else threading.Lock()

    def _facts(self) -> dict[str, str]:
        return {"head": self.context.head, "dtype": self.context.dtype, "trainable": str(self.context.trainable)}

    def _move(self, device: torch.device) -> None:
        with self._exclusive():
            self.model.to(device)
            if self.optimizer:
                self.optimizer.move(device)


def device_of(context: TrainContext) -> torch.device:
    """The role's GPU if it has one and CUDA works here, else the CPU."""
    return torch.device("cuda", context.devices[0]) if context.devices and torch.cuda.is_available() else torch.device("cpu")


def gpu_memory(device: torch.device) -> dict[str, tuple[float, float]]:
    """The metric `system/gpu_memory`, as a sum: the most GiB that torch has held on the device so far; nothing on a CPU."""
    return {"system/gpu_memory": (torch.cuda.max_memory_allocated(device) / 2**30, 1.0)} if device.type == "cuda" else {}


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
