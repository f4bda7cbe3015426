"""Failures of a device turned into one line that names the phase, the role and the keys to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from turnwise.errors import TrainerError


@contextmanager
def out_of_memory_told(phase: str, role: str, train: bool) -> Iterator[None]:
    """Turn running out of memory into a TrainerError; `train` chooses which keys the message names."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        keys = (
            f"{role}.training_args.per_device_train_batch_size (raise gradient_accumulation_steps by as much) or "
            f"{role}.max_tokens_per_microbatch_in_train, or set {role}.model_args.disable_gradient_checkpointing: false"
            if train
            else f"{role}.infer_batch_size or {role}.max_tokens_per_microbatch_in_infer"
        )
        raise TrainerError(f"out of memory, in {phase} of {role}. Fix: lower {keys}; sequence_length helps everywhere") from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory, on an accelerator or in the CPU's allocator."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
