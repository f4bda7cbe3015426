"""The strategy `torch`: one process on one device, or one on each of several that FSDP2 shards the model over; one step
per update."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.contracts.train import Offer, TrainContext
from turnwise.errors import CheckpointError, Problem, refuse
from turnwise_torch import lora, models, shared
from turnwise_torch.base import ModelStrategy
from turnwise_torch.checks import model_problems
from turnwise_torch.config import TorchConfig
from turnwise_torch.device import device_of, release
from turnwise_torch.fsdp import ShardedModel
from turnwise_torch.guard import names_out_of_memory, out_of_memory_named
from turnwise_torch.microbatch import MicroBatch
from turnwise_torch.optimizer import MasterAdamW
from turnwise_torch.parts import Place, is_in_parts, read_parts, write_parts
from turnwise_torch.runner import OneByOne
from turnwise_torch.state import STATE_FILE, read_state, write_state


class TorchStrategy(ModelStrategy):
    """Actor, critic (`head: value`) or reference (`trainable: false`) in this process (see
    turnwise.contracts.train)."""

    config: TorchConfig

    def __init__(self, config: TorchConfig | None, context: TrainContext) -> None:
        self.config = config or TorchConfig()
        refuse(self.check(self.config, context))
        # For policy losses that draw random numbers; nothing here does.
        torch.manual_seed(context.seed + context.ranks.rank)
        super().__init__(context, device_of(context))
        self.logits_chunk = self.config.logits_chunk
        self.sharded: ShardedModel | None = None
        self.optimizer: MasterAdamW | None = None
        self._key: str | None = None
        with out_of_memory_named("loading the model", context.role, "hold", self.savings):
            self.model = self._build_sharded() if context.ranks.size > 1 else self._build_whole()
            self.runner = OneByOne(self.group, self.sharded.backward if self.sharded else self._backward)
            # Before the optimizer exists: a model that is refused has not yet cost the memory of masters.
            with torch.no_grad():
                if context.head == "lm":
                    self._run(models.check_head)
                if context.use_sequence_packing:
                    self._run(models.check_packing)
            if context.trainable:
                self.optimizer = self._build_optimizer()

    @staticmethod
    def transports(config: TorchConfig, context: TrainContext) -> tuple[str, ...]:
        """Those of every strategy; a model that is whole in one process may be shared, too."""
        found = ModelStrategy.transports(config, context)
        return ("shared", *found) if found and context.ranks.size == 1 and len(context.devices) < 2 else found

    @staticmethod
    def check(config: TorchConfig, context: TrainContext) -> list[Problem]:
        """What can be known before the model is loaded."""
        return model_problems(context, "torch")

    def offer(self, transport: str, version: int, receivers: int = 1) -> Offer:
        """`shared`: {"key"} for turnwise_torch.shared.lookup; others as ModelStrategy.offer."""
        if transport == "shared" and transport in self.transports(self.config, self.context):
            self._key = self._key or shared.publish(self.model)
            return Offer(transport, version, {"key": self._key})
        return super().offer(transport, version, receivers)

    @names_out_of_memory("the checkpoint", "hold")
    def save(self, folder: Path) -> None:
        """What is trained (masters, moments) and random state: one file, or with several ranks a part of each. Raises
        CheckpointError."""
        weights = (
            self.optimizer.state()
            if self.optimizer
            else {f"master/{n}": p.detach() for n, p in self.model.named_parameters()}
        )
        random = self._random_names()
        rng = {random["cpu"]: torch.get_rng_state()}
        if self.device.type == "cuda":
            rng[random["cuda"]] = torch.cuda.get_rng_state(self.device)
        write = write_parts if self.sharded else write_state
        write(folder, {**weights, **rng}, self._facts())

    @names_out_of_memory("resuming", "hold")
    def load(self, folder: Path) -> None:
        """Undo `save`, in place and exactly; what several ranks saved is read by any number. Raises CheckpointError."""
        masters: Mapping[str, Tensor] = (
            self.optimizer.masters if self.optimizer else dict(self.model.named_parameters())
        )
        if is_in_parts(folder):
            tensors = read_parts(folder, self._facts(), self._place_for(folder, masters))
        elif self.sharded and (Path(folder) / STATE_FILE).is_file():
            raise CheckpointError(
                f"the training state in {folder} was saved by one process, this run has {self.context.ranks.size}. Fix:"
                f" one device for {self.context.role}, or pretrain: the checkpoint's export and a new optimizer"
            )
        else:
            tensors, _ = read_state(folder, self._facts())
        # Compared before anything is copied: a state that is refused leaves the weights as they were.
        if {n.removeprefix("master/"): t.shape for n, t in tensors.items() if n.startswith("master/")} != {
            n: p.shape for n, p in masters.items()
        }:
            raise self._other_model(folder)
        with self._exclusive(), torch.no_grad():
            if self.optimizer:
                self.optimizer.restore(tensors)
            else:
                for name, parameter in masters.items():
                    parameter.copy_(tensors[f"master/{name}"])
        random = self._random_names()
        # Saved by fewer ranks, this one goes on with its seed.
        if random["cpu"] in tensors:
            torch.set_rng_state(tensors[random["cpu"]])
        if random["cuda"] in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors[random["cuda"]], self.device)

    @names_out_of_memory("offloading", "move")
    def offload(self) -> None:
        """Move model and optimizer to the CPU's memory."""
        self._move(torch.device("cpu"))

    @names_out_of_memory("onloading", "move")
    def onload(self) -> None:
        """Move them back."""
        self._move(self.device)

    def close(self) -> None:
        """Withdraw the shared model and what else is on offer; may be called twice."""
        if self._key is not None:
            shared.withdraw(self._key)
            self._key = None
        super().close()

    # ---------------------------------------------------------------- hooks

    def _optimize(self, lr: float) -> float:
        assert self.optimizer is not None
        norm = self.optimizer.clip(self.context.max_grad_norm)
        # Clipping has scaled every gradient by this norm: where it is not finite a step would make every weight NaN.
        if self._finite(norm):
            with self._exclusive():
                self.optimizer.step(lr)
        return norm

    def _clear(self) -> None:
        assert self.optimizer is not None
        self.optimizer.clear()

    def _whole(self, tensor: Tensor) -> Tensor:
        return self.sharded.whole(tensor) if self.sharded else tensor

    def _log_probs(
        self, batch: MicroBatch, entropy: bool = False, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        compute = super()._log_probs
        return self._run(lambda _: compute(batch, entropy, entropy_gradient))

    def _values(self, batch: MicroBatch) -> Tensor:
        compute = super()._values
        # FSDP's hooks are lost if a view is changed in place.
        return self._run(lambda _: compute(batch).clone())

    def _exclusive(self) -> threading.Lock:
        """The lock that keeps a sampler in this process from decoding with half-written weights."""
        # Without a sampler that shares the module a lock of its own, which is always free.
        return shared.lookup(self._key).lock if self._key else threading.Lock()

    # ---------------------------------------------------------------- the model

    def _backward(self, loss: Tensor, last: bool) -> None:
        """The gradient of one micro-batch, of a model that is whole here."""
        assert self.optimizer is not None
        loss.backward()
        self.optimizer.accumulate()

    def _run(self, compute: Callable[[nn.Module], Any]) -> Any:
        """`compute` on the model, whose parameters are there meanwhile."""
        return self.sharded(compute) if self.sharded else compute(self.model)

    def _build_whole(self) -> nn.Module:
        model = self._load_model(self.context.dtype).to(self.device)
        lora.choose_trained(model, self.context)
        if self.context.trainable and self.context.gradient_checkpointing:
            models.enable_gradient_checkpointing(model)
        return model

    def _build_sharded(self) -> nn.Module:
        self.sharded = ShardedModel(self._load_model, self.context, self.config.fsdp, self.device)
        return self.sharded.model

    def _load_model(self, dtype: str) -> nn.Module:
        load = models.load_causal_lm if self.context.head == "lm" else models.load_value_model
        return load(self.context.model, dtype, self.context.attn_implementation, self.context.trust_remote_code)

    def _build_optimizer(self) -> MasterAdamW:
        masters: dict[str, Tensor] = dict(self.model.named_parameters())
        if not self.sharded:
            # With LoRA the folder's own weights are not trained, and need no masters.
            if self.context.dtype == "bf16" and not self.context.lora:
                # Read a second time in fp32, so that the masters start from what the folder holds and not from rounded
                # values.
                masters = dict(self._load_model("fp32").named_parameters())
            masters |= self._start_adapters()
        return MasterAdamW(
            self.model.named_parameters(), self.config.betas, self.config.eps, self.context.weight_decay, masters
        )

    @torch.no_grad()
    def _start_adapters(self) -> dict[str, Tensor]:
        adapters = lora.initial_values(self.model, self.context.seed)
        for name, value in adapters.items():
            self.model.get_parameter(name).copy_(value)
        return adapters

    def _facts(self) -> dict[str, str]:
        context = self.context
        adapters = (
            f"rank {context.lora.rank}, alpha {context.lora.alpha}, target {context.lora.target}"
            if context.lora
            else "none"
        )
        # AdamW's options are no part of it: a resumed run may change them.
        return {"head": context.head, "dtype": context.dtype, "trainable": str(context.trainable), "lora": adapters}

    def _random_names(self) -> dict[str, str]:
        """The names of the random states in the saved state; every rank has its own."""
        rank = self.context.ranks.rank
        # Rank 0's has no number, so that one process finds a random state in what several saved.
        return {kind: f"rng/{kind}/{rank}" if rank else f"rng/{kind}" for kind in ("cpu", "cuda")}

    def _place_for(self, folder: Path, masters: Mapping[str, Tensor]) -> Place:
        """Where parts are read to: masters in place, moments that are like them, this rank's random state."""

        def place(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
            kind, _, rest = name.partition("/")
            if kind == "rng":
                return torch.empty(shape, dtype=dtype) if name in self._random_names().values() else None
            if rest not in masters or (kind != "step" and masters[rest].shape != shape):
                raise self._other_model(folder)
            # AdamW counts steps in a scalar, whatever the shape of the parameter.
            if kind == "step":
                return torch.zeros(shape, dtype=dtype)
            return masters[rest].detach() if kind == "master" else torch.empty_like(masters[rest].detach())

        return place

    def _other_model(self, folder: Path) -> CheckpointError:
        return CheckpointError(
            f"the training state in {folder} belongs to another model than {self.context.model}. Fix: the pretrain of"
            " that run"
        )

    def _move(self, device: torch.device) -> None:
        with self._exclusive():
            if self.sharded:
                self.sharded.move(device)
            else:
                self.model.to(device)
            # With cpu_offload FSDP keeps the masters in main memory for good, and their moments lie beside them.
            if self.optimizer and not (self.sharded and self.config.fsdp.cpu_offload):
                self.optimizer.move(device)
        if device != self.device:
            release(self.device)
