"""Megatron on a machine without CUDA: while a strategy works, "cuda" means the CPU. On a machine with CUDA nothing here
acts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_lock = threading.Lock()
_users = 0
_originals: list[tuple[Any, str, Any]] = []


@contextmanager
def cuda_or_cpu() -> Iterator[None]:
    """Around every call into Megatron, which names the device "cuda" literally: without CUDA those names are answered
    by the CPU."""
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
    """Tensors asked for on "cuda" are made on the CPU, unpinned; a CPU tensor reports the type name that Megatron's
    optimizers look for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        # Megatron sorts parameters by these names and refuses those of the CPU.
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _Stream:
    """Stands for a stream of work on a GPU: what is asked of it is done when the question returns."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


_STREAM = _Stream()


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


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
    from megatron.core.transformer.moe import token_dispatcher

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def on_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        # Megatron's own makes numbers of a GPU's tensors alone.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any = None, **options: Any) -> Any:
        if len({part.shape for part in parts}) == 1:
            return gather(parts, own, group=group, **options)
        # gloo gathers equal parts alone.
        for rank, part in enumerate(parts):
            if rank == group.rank():
                part.copy_(own)
            dist.broadcast(part, group=group, group_src=rank)
        return None

    def reduce_scatter(out: torch.Tensor, parts: list[torch.Tensor], *, group: Any = None, **options: Any) -> Any:
        if len({part.shape for part in parts}) == 1:
            return scatter(out, parts, group=group, **options)
        for rank, part in enumerate(parts):
            total = part.clone()
            dist.reduce(total, group=group, group_dst=rank)
            if rank == group.rank():
                out.copy_(total)
        return None

    return [
        (dist, "all_gather", all_gather),
        (dist, "reduce_scatter", reduce_scatter),
        (token_dispatcher, "maybe_move_tensor_to_cpu", on_cpu),
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", lambda *_: None),
        # The dispatcher of tokens to experts has one.
        (torch.cuda, "Stream", lambda: _STREAM),
        (torch.cuda, "current_stream", lambda: _STREAM),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", get_state),
        (torch.cuda.random, "get_rng_state", get_state),
        (random, "_set_cuda_rng_state", set_state),
    ]
