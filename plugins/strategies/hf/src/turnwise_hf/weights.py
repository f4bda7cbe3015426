"""The backend's model: loaded, checked for what cached decoding cannot reproduce, shared, and overwritten from a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from turnwise.errors import EngineError, listed
from turnwise_hf.decoding import decode, prefill
from turnwise_hf.folder import weight_files
from turnwise_torch.stream import Bucket

ATTENTION = ("sdpa", "eager")
"""The attention implementations that take a mask per row."""


def check_model(model: nn.Module) -> None:
    """Raise EngineError unless cached decoding gives what the model itself gives.

    Refused by name: linear or sliding-window layers, an attention that takes no mask per row. Whatever else an architecture does (changes
    its logits after the head, keeps another kind of cache) shows in a trial of six tokens.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    name = f"{type(model).__name__} ({config.model_type})"
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
        layers.add("sliding_attention")
    if layers:
        raise EngineError(f"{name} has layers of {listed(layers)}, which the hf backend cannot decode. Fix: another backend (vllm, sglang)")
    if config._attn_implementation not in ATTENTION:
        raise EngineError(
            f"attn_implementation {config._attn_implementation!r} of {name} is none of hf's: {listed(ATTENTION)}. Fix: attn_implementation: sdpa"
        )
    ids = np.arange(6, dtype=np.int32) % int(config.vocab_size)
    try:
        _, _, cache = prefill(model, [ids[:5]], reserved=1)
        ours = decode(model, cache, ids[5:], np.array([5]))[0].float()
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise EngineError(f"the hf backend cannot decode {name}: {error}. Fix: another backend (vllm, sglang)") from error
    with torch.no_grad():
        whole = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(ours.device), use_cache=False).logits[0, -1].float()
    if not torch.allclose(ours, whole, rtol=2e-2, atol=2e-2 * float(whole.abs().max()), equal_nan=True):
        raise EngineError(f"the hf backend's decoding of {name} differs from the model's own forward pass. Fix: another backend (vllm, sglang)")


def load_into(model: nn.Module, folder: Path) -> None:
    """Copy the safetensors weights of a folder in Hugging Face layout into `model`, in place. Raises EngineError.

    Nothing is written before all names and shapes are verified. A tied tensor may come under any one of its names.
    """
    state = model.state_dict()
    files = weight_files(folder)
    if not files or not all(path.is_file() for path in files):
        raise EngineError(f"no safetensors weights of a whole model in {folder}. Fix: export the model again")
    try:
        shapes = {name: (path, shape) for path in files for name, shape in _shapes(path)}
        _verify(state, {name: shape for name, (_, shape) in shapes.items()}, folder)
        for path in files:
            with safe_open(str(path), framework="pt") as weights, torch.no_grad():
                for name in weights.keys():  # noqa: SIM118 - no mapping
                    state[name].copy_(weights.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise EngineError(f"cannot read the weights in {folder}: {error}") from error


def stream_into(model: nn.Module, buckets: Iterable[Bucket]) -> None:
    """Copy a stream of weights into `model`, in place, cast to its dtype. Raises EngineError.

    Tensors are written as they come: one that the model does not have, of another shape, or missing at the end leaves a model that must
    not serve.
    """
    state = model.state_dict()
    missing = set(state)
    for bucket in buckets:
        for name, tensor in bucket:
            if name not in state or state[name].shape != tensor.shape:
                has = f"one of shape {tuple(state[name].shape)}" if name in state else "none of that name"
                raise EngineError(f"the trainer sent {name!r} of shape {tuple(tensor.shape)}, the model has {has}. Fix: one pretrain for both")
            with torch.no_grad():
                state[name].copy_(tensor)
            missing.discard(name)
    if missing:
        raise EngineError(f"the trainer's weights lack {len(missing)} of the model's tensors, such as {min(missing)!r}")


def _shapes(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    with safe_open(str(path), framework="pt") as weights:
        return [(name, tuple(weights.get_slice(name).get_shape())) for name in weights.keys()]  # noqa: SIM118 - no mapping


def _verify(state: dict[str, torch.Tensor], offered: dict[str, tuple[int, ...]], folder: Path) -> None:
    if unknown := offered.keys() - state.keys():
        raise EngineError(f"the weights in {folder} hold {len(unknown)} names that the model does not have, such as {min(unknown)!r}")
    covered = {state[name].data_ptr() for name in offered}
    if missing := [name for name, tensor in state.items() if tensor.data_ptr() not in covered]:
        raise EngineError(f"the weights in {folder} lack {len(missing)} of the model's tensors, such as {missing[0]!r}")
    for name, shape in offered.items():
        if shape != tuple(state[name].shape):
            raise EngineError(f"the weights in {folder} have {name!r} of shape {shape}, the model's is {tuple(state[name].shape)}")
