"""The strategy `torch`: one process, one device, one optimizer step per update."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import torch
from torch import Tensor, nn

from turnwise.contracts.train import Offer, TrainContext
from turnwise.errors import CheckpointError, ConfigError
from turnwise_torch import models, shared
from turnwise_torch.base import ModelStrategy, device_of
from turnwise_torch.config import TorchConfig
from turnwise_torch.guard import out_of_memory_told
from turnwise_torch.objective import kl_estimator
from turnwise_torch.optimizer import MasterAdamW
from turnwise_torch.packing import DENSE, varlen
from turnwise_torch.state import read_state, write_state


class TorchStrategy(ModelStrategy):
    """Actor, critic (`head: value`) or reference (`trainable: false`) in this process (see turnwise.contracts.train)."""

    transports: tuple[str, ...] = ("shared", "shared_memory", "safetensors")

    def __init__(self, config: TorchConfig | None, context: TrainContext) -> None:
        self.config = config or TorchConfig()
        problems = self.check(self.config, context)
        if problems:
            raise ConfigError([line.removeprefix("machine: ") for line in problems])
        torch.manual_seed(context.seed)  # for policy losses that draw random numbers; nothing here does
        super().__init__(context, device_of(context))
        self.logits_chunk = self.config.logits_chunk
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
        self._key: str | None = None

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

    def offer(self, transport: str, version: int, receivers: int = 1) -> Offer:
        """`shared`: {"key"} for turnwise_torch.shared.lookup; others as ModelStrategy.offer."""
        if transport == "shared" and transport in self.transports:
            self._key = self._key or shared.publish(self.model)
            return Offer(transport, version, {"key": self._key})
        return super().offer(transport, version, receivers)

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

    def offload(self) -> None:
        """Move model and optimizer to the CPU's memory."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        """Move them back."""
        self._move(self.device)

    def close(self) -> None:
        """Withdraw the shared model and what else is on offer; may be called twice."""
        if self._key is not None:
            shared.withdraw(self._key)
            self._key = None
        super().close()

    def _backward(self, loss: Tensor, last: bool) -> None:
        assert self.optimizer is not None
        loss.backward()
        self.optimizer.accumulate()

    def _clip(self) -> float:
        assert self.optimizer is not None
        return self.optimizer.clip(self.context.max_grad_norm)

    def _step(self, lr: float) -> None:
        assert self.optimizer is not None
        self.optimizer.step(lr)

    def _clear(self) -> None:
        assert self.optimizer is not None
        self.optimizer.clear()

    def _load_model(self, dtype: str) -> nn.Module:
        load = models.load_causal_lm if self.context.head == "lm" else models.load_value_model
        return load(self.context.model, dtype, self.context.attn_implementation)

    def _build_optimizer(self) -> MasterAdamW:
        # A 16-bit model is read a second time in fp32, so that the masters start from what the folder holds and not from rounded values.
        masters = dict(self._load_model("fp32").named_parameters()) if self.context.dtype == "bf16" else None
        named = self.model.named_parameters()
        return MasterAdamW(named, self.config.betas, self.config.eps, self.context.weight_decay, masters)

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
