"""Low-rank adapters that come alone: put into the model by the first offer of them, overwritten by the later ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.errors import EngineError
from turnwise_torch.lora import ADAPTER, adapter_parameters
from turnwise_torch.models import first_line


def inject(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Put adapters of PEFT's configuration into `model`, in place; they add nothing yet. Raises EngineError."""
    from peft import PeftConfig, inject_adapter_in_model

    try:
        with torch.random.fork_rng(devices=[]):  # PEFT draws values; the trainer's random state may be this process's
            inject_adapter_in_model(PeftConfig.from_peft_type(**config), model, ADAPTER)
    except (TypeError, ValueError, KeyError) as error:
        raise EngineError(
            f"the trainer's adapters do not fit the model: {first_line(error)} Fix: one pretrain for both"
        ) from error


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy adapters, under the names of PEFT's files, into those of `model`, in place. Raises EngineError, and then
    nothing was written."""
    held = adapter_parameters(model)
    if unknown := tensors.keys() - held.keys():
        raise EngineError(
            f"the trainer's adapters hold {len(unknown)} names that the model's do not have, such as {min(unknown)!r}"
        )
    if missing := held.keys() - tensors.keys():
        raise EngineError(
            f"the trainer's adapters lack {len(missing)} of the model's tensors, such as {min(missing)!r}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != held[name].shape:
            raise EngineError(
                f"the trainer's adapters have {name!r} of shape {tuple(tensor.shape)}, the model's is"
                f" {tuple(held[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            held[name].copy_(tensor)


def different(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two configurations, one text a key."""
    return [
        f"{key}: {before.get(key)}, now {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
