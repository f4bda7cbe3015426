"""The strategy `megatron`: Megatron Core's model, schedules and optimizer, one process of a training role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from turnwise.contracts.train import TrainContext
from turnwise.data.rows import Rows, Update
from turnwise.errors import ConfigError, TrainerError
from turnwise_megatron import arguments, convert
from turnwise_megatron.architecture import read_architecture, refusals
from turnwise_megatron.config import MegatronConfig
from turnwise_megatron.export import write_model
from turnwise_megatron.parallel import import_megatron, join
from turnwise_megatron.shim import cuda_or_cpu
from turnwise_torch.base import ModelStrategy, device_of
from turnwise_torch.checks import role_problems
from turnwise_torch.guard import Savings, out_of_memory_told, tells_out_of_memory
from turnwise_torch.microbatch import Layout, MicroBatch, padding
from turnwise_torch.models import torch_dtype

if TYPE_CHECKING:
    from turnwise_megatron.logprobs import Share
    from turnwise_megatron.optimizer import Optimizer
    from turnwise_megatron.schedule import Work
    from turnwise_megatron.state import Parked


class MegatronStrategy(ModelStrategy):
    """Actor, critic (`head: value`) or reference (`trainable: false`), the part of this process (see turnwise.contracts.train)."""

    adapters = False
    savings = Savings(
        recompute="recompute_granularity: full in {role}.strategy_args.strategy_config, or raise its parallel sizes",
        spread="higher parallel sizes in {role}.strategy_args.strategy_config",
    )

    def __init__(self, config: MegatronConfig | None, context: TrainContext) -> None:
        self.config = config or MegatronConfig()
        problems = self.check(self.config, context)
        if problems:
            raise ConfigError([line.removeprefix("machine: ") for line in problems])
        self.architecture = read_architecture(context.model)
        folder = convert.Folder(context.model)
        import_megatron()
        super().__init__(context, device_of(context))
        with ExitStack() as undo:
            undo.callback(self.group.close)
            self.parallel = join(self.config, context, self.device)
            undo.callback(self.parallel.leave)
            torch.manual_seed(context.seed)  # for policy losses that draw random numbers; nothing here does
            with cuda_or_cpu(), out_of_memory_told("loading the model", context.role, "hold", self.savings):
                self._build(folder)
            undo.pop_all()
        self.logits_chunk = self.config.logits_chunk
        self._current: tuple[Tensor, Share] | None = None
        self._parked: Parked | None = None

    @staticmethod
    def check(config: MegatronConfig, context: TrainContext) -> list[str]:
        """What can be known before the model is loaded: one line per problem, `machine: …` for what only this machine lacks."""
        role, problems = context.role, []
        try:
            config.data_parallel_size(max(context.ranks.size, len(context.devices)))
        except ValueError as error:
            problems.append(f"{role}.device_mapping: {error}. Fix: the number of devices, or the sizes in strategy_config")
        problems += role_problems(context, "megatron")
        if context.use_sequence_packing:
            problems.append(f"{role}.use_sequence_packing: strategy megatron does not pack. Fix: false; token budgets sort samples by length")
        if context.lora is not None:
            problems.append(f"{role}.model_args: strategy megatron trains no adapters (LoRA). Fix: strategy_name: torch or deepspeed")
        if context.frozen:
            problems.append(f"{role}: strategy megatron cannot freeze {', '.join(context.frozen)}. Fix: strategy_name: torch or deepspeed")
        known = refusals(context.model, config) if context.model != Path() else []  # before a run the model is not prepared yet
        return [*problems, *arguments.problems(role, config.engine_args), *known]

    def _build(self, folder: convert.Folder) -> None:
        from turnwise_megatron import model
        from turnwise_megatron.optimizer import Optimizer

        context, value = self.context, self.context.head == "value"
        extra, rest = arguments.split(self.config.engine_args)
        settings = model.transformer_config(self.architecture, self.config, torch_dtype(context.dtype), extra)
        layers, last = model.stage_layers(settings), self.parallel.sizes["pipeline"] - 1
        given = (value, self.parallel.experts.size)
        self._stages = [list(convert.stage_entries(self.architecture, part, n == 0, n == last, *given)) for n, part in enumerate(layers)]
        built = model.build(self.architecture, settings, self.parallel, value)
        built.vocabulary = self.architecture.vocabulary
        convert.load(built, self._stages[self.parallel.pipeline], folder, self.architecture, self.parallel)
        self.model: Any = built.to(self.device)
        self.model.requires_grad_(context.trainable)
        self.optimizer: Optimizer | None = None
        if context.trainable:
            self.optimizer = Optimizer(self.model, self.config, context.weight_decay, rest)
        self._sequence_parallel = bool(settings.sequence_parallel)

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) among the processes that see different rows; those of one tensor, pipeline or context parallel group see the same."""
        return self.parallel.data

    # ---------------------------------------------------------------- updates

    def _accumulate(self, update: Update, columns: Mapping[str, np.ndarray]) -> tuple[float, dict[str, tuple[float, float]]]:
        """As in ModelStrategy; a rank without rows computes one micro-batch of coefficient zero, so that gradients meet, and ranks that share
        experts compute equal numbers of micro-batches, so that tokens meet."""
        assert self.optimizer is not None
        context, layout = self.context, Layout(update.rows)
        wanted = (columns["coef"] != 0) | (columns["weight"] != 0)
        groups = self._groups(layout, context.per_device_train_batch_size, context.max_tokens_per_microbatch_in_train, wanted)
        filler, count = padding(self.device), max(1, self._together(len(groups)))
        zeros = {name: np.zeros((1, *column.shape[1:]), column.dtype) for name, column in columns.items()}
        batches = chain((self._batch(layout, group) for group in groups), repeat(filler, count - len(groups)))

        def work(hidden: Tensor, share: Share, batch: MicroBatch) -> tuple[Tensor, Any]:
            self._current = hidden, share
            loss, sums = self._terms(batch, zeros if batch is filler else columns, update)
            return loss, (float(loss.detach()), {name: (float(x), float(w)) for name, (x, w) in sums.items()})

        self.optimizer.clear()
        answers = self._run(batches, count, work, train=True)
        total: dict[str, tuple[float, float]] = {}
        for _, sums in answers:
            for name, (x, w) in sums.items():
                before = total.get(name, (0.0, 0.0))
                total[name] = (before[0] + x, before[1] + w)
        return sum(loss for loss, _ in answers), total

    def _log_probs(self, batch: MicroBatch, entropy: bool = False, entropy_gradient: bool = False) -> tuple[Tensor, Tensor | None]:
        from turnwise_megatron.logprobs import token_log_probs

        assert self._current is not None
        hidden, share = self._current
        options = (self.logits_chunk, entropy, entropy_gradient)
        return token_log_probs(self.model, hidden, share, self.parallel, self.context.temperature, *options)

    def _values(self, batch: MicroBatch) -> Tensor:
        from turnwise_megatron.logprobs import token_values

        assert self._current is not None
        return token_values(self.model, *self._current, self.parallel)

    def _clip(self) -> float:
        assert self.optimizer is not None
        with cuda_or_cpu():
            return self.optimizer.clip(self.context.max_grad_norm)

    def _step(self, lr: float) -> None:
        assert self.optimizer is not None
        with cuda_or_cpu():
            self.optimizer.step(lr)

    def _clear(self) -> None:
        assert self.optimizer is not None
        self._current = None
        self.optimizer.clear()

    # ---------------------------------------------------------------- log-probs and values

    def _infer(self, phase: str, rows: Rows, compute: Callable[[MicroBatch], Tensor]) -> np.ndarray:
        self._check_rows(rows)
        layout = Layout(rows)
        out = np.zeros(len(layout.position), np.float32)
        groups = self._groups(layout, self.context.infer_batch_size, self.context.max_tokens_per_microbatch_in_infer)
        filler, count = padding(self.device), self._together(len(groups))
        if not count:
            return out
        batches = chain((self._batch(layout, group) for group in groups), repeat(filler, count - len(groups)))

        def work(hidden: Tensor, share: Share, batch: MicroBatch) -> tuple[Tensor, Any]:
            self._current = hidden, share
            values = compute(batch).float().cpu().numpy()
            return hidden, None if batch is filler else (batch.responses, values)

        with out_of_memory_told(phase, self.context.role, "infer", self.savings), torch.no_grad():
            for answer in self._run(batches, count, work, train=False):
                if answer is not None:
                    out[answer[0]] = answer[1]
        self._current = None
        return out

    def _together(self, count: int) -> int:
        """How many micro-batches a rank with `count` of its own computes: where ranks share experts the most of all, for each serves the others."""
        return self.group.largest(count)[0] if self.parallel.experts.size > 1 else count

    def _run(self, batches: Iterator[MicroBatch], count: int, work: Work, train: bool) -> list[Any]:
        from turnwise_megatron.schedule import run

        module = self.optimizer.ddp if self.optimizer is not None else self.model
        with cuda_or_cpu():
            return run(module, self.parallel, batches, count, work, self._sequence_parallel, train)

    def _check_rows(self, rows: Rows) -> None:
        if rows.images:
            raise TrainerError(f"{self.context.role} received images, strategy megatron trains text models. Fix: strategy_name: torch or deepspeed")
        ids, size = rows.input_ids, self.architecture.vocabulary
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            worst = int(ids.max()) if ids.max() >= size else int(ids.min())
            raise TrainerError(f"{self.context.role} received the token id {worst}, its model has ids 0 to {size - 1}")

    # ---------------------------------------------------------------- weights, checkpoints, memory

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under their Hugging Face names on rank 0, tied ones under every name; all ranks iterate."""
        folder = convert.Folder(self.context.model)
        value_head = {"value_head.weight": (1, self.architecture.hidden), "value_head.bias": (1,)}

        def shape(name: str) -> tuple[int, ...]:
            return value_head.get(name) or tuple(folder.slice(name).get_shape())

        return convert.gathered(self.model, self._stages, self.architecture, self.parallel, shape)

    @tells_out_of_memory("the export", "hold")
    def export(self, folder: Path) -> None:
        """Weights in the compute dtype with config and tokenizer, in Hugging Face layout, written by rank 0. Raises CheckpointError."""
        weights = self.weights()
        try:
            if self.context.ranks.rank == 0:
                write_model(Path(folder), self.context.model, weights, self.context.dtype, self.architecture.tied)
        finally:
            for _ in weights:  # the other ranks gather on: their collectives must meet
                pass

    @tells_out_of_memory("the checkpoint", "hold")
    def save(self, folder: Path) -> None:
        """This process's weights, masters, moments and random state, in a folder of its own in `folder`. Raises CheckpointError."""
        from turnwise_megatron import state

        facts = {**self._facts(), "updates": str(self._updates)}
        state.save(Path(folder), self.model, self.optimizer, self.parallel, self.config.use_distributed_optimizer, facts)

    @tells_out_of_memory("resuming", "hold")
    def load(self, folder: Path) -> None:
        """Undo `save`, in place and exactly, under the same parallel layout. Raises CheckpointError."""
        from turnwise_megatron import state

        facts = state.load(Path(folder), self.model, self.optimizer, self.parallel, self.config.use_distributed_optimizer, self._facts())
        self._updates = int(facts["updates"])

    def _facts(self) -> dict[str, str]:
        idle = ("expert", "expert tensor") if self.architecture.experts is None else ()
        sizes = {name: size for name, size in self.parallel.sizes.items() if name not in idle} | {"data": self.parallel.data[1]}
        layout = [f"{name} {size}" for name, size in sizes.items()]
        if self.optimizer is not None:
            layout.append("distributed optimizer" if self.config.use_distributed_optimizer else "plain optimizer")
        context = self.context
        return {"layout": ", ".join(layout), "head": context.head, "dtype": context.dtype, "trainable": str(context.trainable)}

    @tells_out_of_memory("offloading", "move")
    def offload(self) -> None:
        """Move model and optimizer to the CPU's memory and drop the gradients; without a GPU they are there already."""
        from turnwise_megatron.state import Parked

        if self.device.type != "cuda" or self._parked is not None:
            return
        kept = [*self.model.parameters(), *self.model.buffers()]
        dropped: list[Tensor] = []
        if self.optimizer is not None:
            kept += [*self.optimizer.masters, *(x for adam in self.optimizer.adams for held in adam.state.values() for x in held.values())]
            dropped = self.optimizer.gradients
        self._parked = Parked([x for x in kept if isinstance(x, Tensor) and x.is_cuda], dropped)
        torch.cuda.empty_cache()

    @tells_out_of_memory("onloading", "move")
    def onload(self) -> None:
        """Move them back."""
        if self._parked is not None:
            self._parked.back()
            self._parked = None

    def close(self) -> None:
        """Withdraw what is on offer and leave the process groups; may be called twice."""
        self.parallel.leave()
        super().close()
