"""What an engine holds on its device, whatever the stage.

DeepSpeed's own offloading moves the states of FusedAdam alone at stage 3, and has no method for masters kept at stage 0
or 1 in bf16."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Where ZeRO-3 keeps a parameter's part while the parameter itself is empty; the second one is ZeRO++'s (hpZ).
_PARTITIONS = ("ds_tensor", "ds_secondary_tensor")
_WALKED = ("deepspeed.", "torch.optim.")


def states(model: nn.Module, engine: Any, device: torch.device) -> list[Tensor]:
    """The tensors on `device` (parameters and partitions of them, buffers, masters, moments, the engine's own buffers),
    some of them views of others. `engine` None: the model's alone."""
    parameters = list(model.parameters())
    found = [
        *parameters,
        *model.buffers(),
        *(getattr(p, name) for p in parameters for name in _PARTITIONS if hasattr(p, name)),
    ]
    if engine is not None:
        found += _reachable([engine.optimizer, engine.basic_optimizer])
    found += [
        tensor.grad for tensor in found if isinstance(tensor, Tensor) and tensor.is_leaf and tensor.grad is not None
    ]
    return [tensor for tensor in found if isinstance(tensor, Tensor) and tensor.device.type == device.type]


def gradients(engine: Any, device: torch.device) -> list[Tensor]:
    """Buffers that hold zeros between updates."""
    buffer = getattr(engine.optimizer, "grad_partitions_flat_buffer", None)
    return [buffer] if isinstance(buffer, Tensor) and buffer.device.type == device.type else []


def _reachable(roots: list[Any]) -> Iterator[Tensor]:
    """Every tensor in the attributes, lists and mappings of the engine's and torch's optimizers."""
    # By identity: engine and optimizers refer to one another in circles, and tensors do not compare as wholes.
    seen: set[int] = set()
    waiting = deque(roots)
    while waiting:
        item = waiting.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset | deque):
            waiting += item
        # Nothing but these: process groups and modules lead everywhere, and the model's tensors are counted already.
        elif type(item).__module__.startswith(_WALKED) and not isinstance(item, nn.Module | type):
            waiting += vars(item).values() if hasattr(item, "__dict__") else ()
