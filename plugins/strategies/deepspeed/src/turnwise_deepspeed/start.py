"""DeepSpeed in this process: imported quietly, without a launcher, and without compiling anything."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from turnwise.contracts.train import Ranks
from turnwise.errors import MachineError

_SHARED_MEMORY_OP = "deepspeed_shm_comm"
_WARNINGS = (
    (r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning),
    (r"`torch\.jit\.script(_method)?` is deprecated", DeprecationWarning),
)
"""What torch says of DeepSpeed's own calls."""


def load() -> Any:
    """The module `deepspeed`. On a machine without CUDA its accelerator is set to the CPU before it looks for one.
    Raises MachineError."""
    if not torch.cuda.is_available():
        # Before the import, which chooses the accelerator.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise MachineError(
            f"strategy deepspeed needs the package deepspeed ({error}). Fix: pip install"
            " 'turnwise-deepspeed[deepspeed]'"
        ) from error
    import deepspeed.runtime.bf16_optimizer

    for message, category in _WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    deepspeed.runtime.bf16_optimizer.see_memory_usage = (
        _say_nothing  # it prints a report, whatever the level of logging
    )
    # Collectives between processes of a host through shared memory: a C++ extension that would be compiled for minutes
    # at the first start.
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY_OP] = False
    return deepspeed


def join(ranks: Ranks, device: torch.device) -> Any:
    """The module `deepspeed`, on the process group of the role. A role of one process gets a group of itself, which
    stays: DeepSpeed keeps references to it. Raises MachineError: this process belongs to another group, or DeepSpeed
    chose another kind of device."""
    deepspeed = load()
    kind = deepspeed.get_accelerator().device_name()
    if kind != device.type:
        fix = f"devices in device_mapping, or DS_ACCELERATOR={device.type}"
        raise MachineError(
            f"DeepSpeed drives the {kind} in this process and the role is on the {device.type}. Fix: {fix}"
        )
    index = str(device.index or 0)
    # DeepSpeed reads its device from LOCAL_RANK, again and again: it cannot change once a role has set it.
    if os.environ.setdefault("LOCAL_RANK", index) != index and device.type == "cuda":
        raise MachineError(
            f"this process already drives device {os.environ['LOCAL_RANK']} (LOCAL_RANK), the role is on device {index}."
            " Fix: one device for both roles, or a runtime of several processes"
        )
    if not dist.is_initialized():
        # DeepSpeed's own start without a launcher looks for one (MPI, environment variables).
        dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != ranks.size:
        raise MachineError(
            f"this process is in a group of {dist.get_world_size()}, the role has {ranks.size} processes. Fix: as many"
            " devices for both roles, or a runtime of several processes"
        )
    deepspeed.init_distributed(dist_backend=_backend(device), auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _say_nothing(message: str, force: bool = False) -> None:
    """In place of a report of memory."""


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
