"""Megatron on a machine without CUDA: while a strategy works, "cuda" means the CPU. On a machine with CUDA nothing here acts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_lock = threading.Lock()
_users = 0
_originals: list[tuple[Any, str, Any]] = []


@contextmanager
def cuda_or_cpu() -> Iterator[None]:
    """Around every call into Megatron, which names the device "cuda" literally: without CUDA those names are answered by the CPU."""
    if torch.cuda.is_available():
        yield
        return
    _replace(+1)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        _replace(-1)


class _CudaMeansCpu(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU, unpinned; a CPU tensor tells the type name that Megatron's optimizers look for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (isinstance(device, torch.device) and device.type == "cuda")


def _replace(change: int) -> None:
    """Functions of torch.cuda are replaced while there is a user, in whatever thread, and put back after the last."""
    global _users  # noqa: PLW0603 (a count for the whole process, like the functions it guards)
    with _lock:
        _users += change
        if _users == 1 and change == 1:
            for owner, name, function in _replacements():
                _originals.append((owner, name, getattr(owner, name)))
                setattr(owner, name, function)
        elif _users == 0:
            while _originals:
                setattr(*_originals.pop())


def _replacements() -> list[tuple[Any, str, Any]]:
    from megatron.core.tensor_parallel import random

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    return [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", get_state),
        (torch.cuda.random, "get_rng_state", get_state),
        (random, "_set_cuda_rng_state", set_state),
    ]
