"""Memory that does not do, of a device or of the machine, turned into one line that names the phase, the role and the
keys to lower."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from attrs import frozen

from turnwise.errors import OutOfMemory

P = ParamSpec("P")
T = TypeVar("T")
Use = Literal["update", "infer", "send", "hold", "move"]
"""What memory is needed for: an update, answers, weights on their way to the samplers, a whole model or its state, a role's place."""

_FIXES: dict[Use, str] = {
    "update": (
        "lower {role}.training_args.per_device_train_batch_size (raise gradient_accumulation_steps by as much) or "
        "{role}.max_tokens_per_microbatch_in_train, or set {recompute}; sequence_length helps everywhere"
    ),
    "infer": (
        "lower {role}.infer_batch_size or {role}.max_tokens_per_microbatch_in_infer; sequence_length helps everywhere"
    ),
    "send": (
        "lower model_update_buffer_size_mb, or what the sampler keeps (gpu_memory_utilization or mem_fraction_static in"
        " actor_infer.strategy_args.strategy_config), or set {spread}"
    ),
    "hold": "more devices in {role}.device_mapping, or set {spread}",
    "move": "devices of its own in {role}.device_mapping, with which it is not moved, or set {spread}",
}


@frozen
class Savings:
    """What a strategy has to save memory with, as users read it; `{role}` stands for the role's name."""

    recompute: str
    spread: str


@contextmanager
def out_of_memory_named(phase: str, role: str, use: Use, savings: Savings) -> Iterator[None]:
    """Raise OutOfMemory, one line, in place of what torch raises when memory does not do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fix = _FIXES[use].format(
            role=role, recompute=savings.recompute.format(role=role), spread=savings.spread.format(role=role)
        )
        raise OutOfMemory(f"out of memory, in {phase} of {role}. Fix: {fix}") from error


def names_out_of_memory(
    phase: str, use: Use
) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """`out_of_memory_named` around a strategy's method."""

    def decorate(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        @functools.wraps(method)
        def guarded(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
            with out_of_memory_named(phase, self.context.role, use, self.savings):
                return method(self, *args, **kwargs)

        return guarded

    return decorate


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: an accelerator's (also of CUDA, cuBLAS or NCCL beside torch's allocator), or the
    machine's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
    )
