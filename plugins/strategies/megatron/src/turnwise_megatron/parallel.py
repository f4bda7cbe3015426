"""Megatron's process groups: made once for a process, shared by the strategies in it that want the same layout."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist
from attrs import field, frozen

from turnwise.contracts.train import TrainContext
from turnwise.errors import ConfigError
from turnwise_megatron.config import MegatronConfig
from turnwise_megatron.shim import cuda_or_cpu

# Megatron keeps its groups in globals of the process: whoever uses them is counted here.
_users: list[Parallel] = []


@frozen(eq=False)
class ExpertParallel:
    """The place of this process among those that share a stage's experts: `rank` of `size` has some, `tensor` of
    `tensor_size` a part of each."""

    size: int
    rank: int
    tensor_size: int
    tensor: int
    replica: int
    """Among the processes that hold the same experts."""
    owner: int
    """The global rank of the first of them."""
    group: dist.ProcessGroup
    """The processes that together hold all experts of a stage once; of one expert's parts first."""


@frozen(eq=False)
class Parallel:
    """The place of this process: ranks and groups of Megatron's parallel forms. `data` counts those that see different
    rows."""

    sizes: Mapping[str, int]
    rank: int
    tensor: int
    pipeline: int
    context: int
    data: tuple[int, int]
    replica: int
    """Among the processes that hold the same weights (data and context parallel)."""
    owner: int
    """The global rank of the first of them."""
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    pipeline_ranks: tuple[int, ...]
    """Global ranks of this pipeline, first stage first."""
    experts: ExpertParallel
    _own_default: bool = field(default=False)

    @property
    def last_stage(self) -> bool:
        """Whether the loss is computed here."""
        return self.pipeline == self.sizes["pipeline"] - 1

    def holders(self, expert: bool) -> tuple[int, int]:
        """(which of those that hold the same weights this process is, the global rank of the first): of experts'
        weights, or of the others."""
        return (self.experts.replica, self.experts.owner) if expert else (self.replica, self.owner)

    def leave(self) -> None:
        """Give the groups back; after the last strategy they are destroyed. May be called twice."""
        if self not in _users:
            return
        _users.remove(self)
        if not _users:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            if self._own_default:
                dist.destroy_process_group()


def import_megatron() -> None:
    """Import Megatron without its warnings: of packages that this strategy does not use (Apex, Transformer Engine), and
    of its own calls."""
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("distributed", "models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel", "tensor_parallel"):
            importlib.import_module(f"megatron.core.{name}")


def join(config: MegatronConfig, context: TrainContext, device: torch.device) -> Parallel:
    """The groups of `config` over torch's default group, which is made here for one process. Raises ConfigError for a
    second layout."""
    sizes = {
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "context": config.context_parallel_size,
        "expert": config.expert_model_parallel_size,
        "expert tensor": config.experts_tensor_parallel,
    }
    if _users and dict(_users[0].sizes) != sizes:
        raise ConfigError(
            f"one process has one Megatron layout, and {dict(_users[0].sizes)} came before {sizes}. "
            "Fix: equal parallel sizes for the roles of a process"
        )
    import_megatron()
    from megatron.core import parallel_state

    # The last strategy that leaves destroys the group, whichever of them made it.
    own = _users[0]._own_default if _users else False
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        own = True
    world, size = dist.get_world_size(), context.ranks.size
    if world != size:
        raise ConfigError(
            f"this process is one of {world} in torch's default group, the role has {size}. Fix: runtime: ray"
        )
    if not _users:
        _make_groups(sizes, context)
    made = Parallel(
        sizes=sizes,
        rank=dist.get_rank(),
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        context=parallel_state.get_context_parallel_rank(),
        data=(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()),
        replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        owner=parallel_state.get_data_parallel_src_rank(with_context_parallel=True),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        context_group=parallel_state.get_context_parallel_group(),
        pipeline_ranks=tuple(dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())),
        experts=_experts(),
        own_default=own,
    )
    _users.append(made)
    return made


def _make_groups(sizes: Mapping[str, int], context: TrainContext) -> None:
    """Megatron's own groups, and its random states."""
    from megatron.core import parallel_state, tensor_parallel

    with cuda_or_cpu():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes["tensor"],
            pipeline_model_parallel_size=sizes["pipeline"],
            context_parallel_size=sizes["context"],
            expert_model_parallel_size=sizes["expert"],
            expert_tensor_parallel_size=sizes["expert tensor"],
            # Megatron counts in whole minutes.
            distributed_timeout_minutes=math.ceil(context.runtime_timeout / 60),
            create_gloo_process_groups=False,
        )
        # Dropout and initialisation inside Megatron draw from these; each rank of tensor parallelism gets its own.
        tensor_parallel.model_parallel_cuda_manual_seed(context.seed, force_reset_rng=True)


def _experts() -> ExpertParallel:
    """This process's place in the groups that were made last."""
    from megatron.core import parallel_state

    return ExpertParallel(
        size=parallel_state.get_expert_model_parallel_world_size(),
        rank=parallel_state.get_expert_model_parallel_rank(),
        tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
        tensor=parallel_state.get_expert_tensor_parallel_rank(),
        replica=parallel_state.get_expert_data_parallel_rank(),
        owner=dist.get_process_group_ranks(parallel_state.get_expert_data_parallel_group())[0],
        group=parallel_state.get_expert_tensor_and_model_parallel_group(),
    )
