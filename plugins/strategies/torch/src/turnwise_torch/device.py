"""The device of one process: which it is, the memory that torch holds there, and how it is given back."""

from __future__ import annotations

import torch

from turnwise.contracts.train import TrainContext


def device_of(context: TrainContext) -> torch.device:
    """The process's GPU if it has one and CUDA works here, else the CPU. The GPU becomes the calling thread's current
    one: kernels and libraries that are given no device take that, which would be GPU 0."""
    if not context.devices or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", context.devices[0])
    torch.cuda.set_device(device)
    return device


def gpu_memory(device: torch.device) -> dict[str, tuple[float, float]]:
    """The metric `system/gpu_memory`, as a sum: the most GiB that torch has held on the device so far; nothing on a
    CPU."""
    return (
        {"system/gpu_memory": (torch.cuda.max_memory_allocated(device) / 2**30, 1.0)} if device.type == "cuda" else {}
    )


def has_own_memory(device: torch.device) -> bool:
    """Whether moving to main memory gives anything back."""
    return device.type != "cpu"


def release(device: torch.device) -> None:
    """Give back what torch keeps for later allocations: other processes on the device cannot use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
