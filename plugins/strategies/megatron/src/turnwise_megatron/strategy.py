"""The strategy `megatron`: Megatron Core's model, schedules and optimizer, one process of a training role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turnwise.contracts.train import TrainContext
from turnwise.errors import Problem, refuse
from turnwise_megatron import arguments, convert
from turnwise_megatron.architecture import read_architecture, refusals
from turnwise_megatron.config import MegatronConfig
from turnwise_megatron.export import write_model
from turnwise_megatron.parallel import import_megatron, join
from turnwise_megatron.shim import cuda_or_cpu
from turnwise_torch.checks import role_problems
from turnwise_torch.device import device_of
from turnwise_torch.guard import Savings, names_out_of_memory, out_of_memory_named
from turnwise_torch.microbatch import MicroBatch
from turnwise_torch.models import torch_dtype
from turnwise_torch.parked import ParkedStrategy

if TYPE_CHECKING:
    from turnwise_megatron.optimizer import Optimizer
    from turnwise_megatron.schedule import Schedule
    from turnwise_megatron.state import Held


class MegatronStrategy(ParkedStrategy):
    """Actor, critic (`head: value`) or reference (`trainable: false`), the part of this process (see
    turnwise.contracts.train)."""

    savings = Savings(
        recompute="recompute_granularity: full in {role}.strategy_args.strategy_config, or raise its parallel sizes",
        spread="higher parallel sizes in {role}.strategy_args.strategy_config",
    )

    runner: Schedule

    def __init__(self, config: MegatronConfig | None, context: TrainContext) -> None:
        self.config = config or MegatronConfig()
        refuse(self.check(self.config, context))
        self.architecture = read_architecture(context.model)
        # Opened before any process group is joined: a folder that cannot be read costs nothing yet.
        folder = convert.Folder(context.model)
        import_megatron()
        super().__init__(context, device_of(context))
        # A constructor that fails has no `close`: what it joined would stay, and refuse the next layout.
        with ExitStack() as undo:
            undo.callback(self.group.close)
            self.parallel = join(self.config, context, self.device)
            undo.callback(self.parallel.leave)
            # For policy losses that draw random numbers; nothing here does.
            torch.manual_seed(context.seed)
            with cuda_or_cpu(), out_of_memory_named("loading the model", context.role, "hold", self.savings):
                self._build(folder)
            undo.pop_all()
        self.logits_chunk = self.config.logits_chunk
        if context.trainable:
            self._clear()

    @staticmethod
    def check(config: MegatronConfig, context: TrainContext) -> list[Problem]:
        """What can be known before the model is loaded."""
        role, problems = context.role, list[Problem]()
        try:
            config.data_parallel_size(max(context.ranks.size, len(context.devices)))
        except ValueError as error:
            problems.append(
                Problem(
                    f"{role}.device_mapping", f"{error}. Fix: the number of devices, or the sizes in strategy_config"
                )
            )
        problems += role_problems(context, "megatron")
        if context.use_sequence_packing:
            text = "strategy megatron does not pack. Fix: false; token budgets sort samples by length"
            problems.append(Problem(f"{role}.use_sequence_packing", text))
        if context.lora is not None:
            problems.append(
                Problem(
                    f"{role}.model_args",
                    "strategy megatron trains no adapters (LoRA). Fix: strategy_name: torch or deepspeed",
                )
            )
        if context.frozen:
            text = (
                f"strategy megatron cannot freeze {', '.join(context.frozen)}. Fix: strategy_name: torch or deepspeed"
            )
            problems.append(Problem(role, text))
        # Before a run the model is not prepared yet.
        known = refusals(context.model, config) if context.model != Path() else []
        return [*problems, *arguments.problems(role, config.engine_args), *(Problem("", line) for line in known)]

    def _build(self, folder: convert.Folder) -> None:
        from turnwise_megatron import model
        from turnwise_megatron.optimizer import Optimizer
        from turnwise_megatron.schedule import Schedule

        context, value = self.context, self.context.head == "value"
        extra, rest = arguments.split(self.config.engine_args)
        settings = model.transformer_config(self.architecture, self.config, torch_dtype(context.dtype), extra)
        layers, last = model.stage_layers(settings), self.parallel.sizes["pipeline"] - 1
        given = (value, self.parallel.experts.size)
        self._stages = [
            list(convert.stage_entries(self.architecture, part, n == 0, n == last, *given))
            for n, part in enumerate(layers)
        ]
        built = model.build(self.architecture, settings, self.parallel, value)
        # Without the padding: logprobs masks the rows beyond it.
        built.vocabulary = self.architecture.vocabulary
        convert.load(built, self._stages[self.parallel.pipeline], folder, self.architecture, self.parallel)
        self.model: Any = built.to(self.device)
        self.model.requires_grad_(context.trainable)
        self.optimizer: Optimizer | None = None
        if context.trainable:
            self.optimizer = Optimizer(self.model, self.config, context.weight_decay, rest)
        module = self.model if self.optimizer is None else self.optimizer.ddp
        self.runner = Schedule(module, self.parallel, self.group, bool(settings.sequence_parallel))

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) among the processes that see different rows; those of one tensor, pipeline or context parallel
        group see the same."""
        return self.parallel.data

    # ---------------------------------------------------------------- log-probs, values, updates

    def _log_probs(
        self, batch: MicroBatch, entropy: bool = False, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        from turnwise_megatron.logprobs import token_log_probs

        hidden, share = self.runner.current
        options = (self.logits_chunk, entropy, entropy_gradient)
        return token_log_probs(self.model, hidden, share, self.parallel, self.context.temperature, *options)

    def _values(self, batch: MicroBatch) -> Tensor:
        from turnwise_megatron.logprobs import token_values

        return token_values(self.model, *self.runner.current, self.parallel)

    def _optimize(self, lr: float) -> float:
        assert self.optimizer is not None
        with cuda_or_cpu():
            norm = self.optimizer.clip(self.context.max_grad_norm)
            if self._finite(norm):
                self.optimizer.step(lr)
        return norm

    def _clear(self) -> None:
        assert self.optimizer is not None
        self.optimizer.clear()

    def _vocabulary(self) -> int:
        return self.architecture.vocabulary

    # ---------------------------------------------------------------- weights, checkpoints, memory

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under their Hugging Face names on rank 0, tied ones under every name; all ranks iterate."""
        folder = convert.Folder(self.context.model)
        value_head = {"value_head.weight": (1, self.architecture.hidden), "value_head.bias": (1,)}

        def shape(name: str) -> tuple[int, ...]:
            return value_head.get(name) or tuple(folder.slice(name).get_shape())

        return convert.gathered(self.model, self._stages, self.architecture, self.parallel, shape)

    @names_out_of_memory("the export", "hold")
    def export(self, folder: Path) -> None:
        """Weights in the compute dtype with config and tokenizer, in Hugging Face layout, written by rank 0. Raises
        CheckpointError."""
        weights = self.weights()
        try:
            if self.context.ranks.rank == 0:
                write_model(Path(folder), self.context.model, weights, self.context.dtype, self.architecture.tied)
        finally:
            # The other ranks gather on: their collectives must meet.
            for _ in weights:
                pass

    @names_out_of_memory("the checkpoint", "hold")
    def save(self, folder: Path) -> None:
        """This process's weights, masters, moments and random state, in a folder of its own in `folder`. Raises
        CheckpointError."""
        from turnwise_megatron import state

        state.save(Path(folder), self._held())

    @names_out_of_memory("resuming", "hold")
    def load(self, folder: Path) -> None:
        """Undo `save`, in place and exactly, under the same parallel layout. Raises CheckpointError."""
        from turnwise_megatron import state

        state.load(Path(folder), self._held())

    def _held(self) -> Held:
        from turnwise_megatron.state import Held

        return Held(self.model, self.optimizer, self.parallel, self.config.use_distributed_optimizer, self._facts())

    def _facts(self) -> dict[str, str]:
        # These sizes move no tensor of a dense model, so a state fits whatever they are.
        idle = ("expert", "expert tensor") if self.architecture.experts is None else ()
        sizes = {name: size for name, size in self.parallel.sizes.items() if name not in idle} | {
            "data": self.parallel.data[1]
        }
        layout = [f"{name} {size}" for name, size in sizes.items()]
        if self.optimizer is not None:
            layout.append("distributed optimizer" if self.config.use_distributed_optimizer else "plain optimizer")
        context = self.context
        return {
            "layout": ", ".join(layout),
            "head": context.head,
            "dtype": context.dtype,
            "trainable": str(context.trainable),
        }

    def _movable(self) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        kept = [*self.model.parameters(), *self.model.buffers()]
        dropped: list[Tensor] = []
        if self.optimizer is not None:
            kept += [
                *self.optimizer.masters,
                *(x for adam in self.optimizer.adams for held in adam.state.values() for x in held.values()),
            ]
            dropped = self.optimizer.gradients
        return [x for x in kept if isinstance(x, Tensor) and x.device.type == self.device.type], dropped

    def close(self) -> None:
        """Withdraw what is on offer and leave the process groups; may be called twice."""
        self.parallel.leave()
        super().close()
