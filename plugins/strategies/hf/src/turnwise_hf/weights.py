"""The backend's model: loaded, checked for what cached decoding cannot reproduce, shared, and overwritten from a
folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from turnwise.errors import EngineError, listed
from turnwise_hf.decoding import decode, prefill
from turnwise_hf.shards import weight_files
from turnwise_torch.experts import CheckpointForm
from turnwise_torch.stream import Bucket, units

ATTENTION = ("sdpa", "eager")
"""The attention implementations that take a mask per row."""


def check_model(model: nn.Module) -> None:
    """Raise EngineError unless cached decoding gives what the model itself gives.

    Refused by name: linear or sliding-window layers, an attention that takes no mask per row. Whatever else an
    architecture does (changes its logits after the head, keeps another kind of cache) shows in a trial of six tokens.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    name = f"{type(model).__name__} ({config.model_type})"
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
        layers.add("sliding_attention")
    if layers:
        raise EngineError(
            f"{name} has layers of {listed(layers)}, which the hf backend cannot decode. Fix: another backend (vllm,"
            " sglang)"
        )
    if config._attn_implementation not in ATTENTION:
        raise EngineError(
            f"attn_implementation {config._attn_implementation!r} of {name} is none of hf's: {listed(ATTENTION)}. Fix:"
            " attn_implementation: sdpa"
        )
    # Five tokens are read and one is decoded, so that both ways through the cache are tried.
    ids = np.arange(6, dtype=np.int32) % int(config.vocab_size)
    try:
        _, _, cache = prefill(model, [ids[:5]], reserved=1)
        ours = decode(model, cache, ids[5:], np.array([5]))[0].float()
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise EngineError(
            f"the hf backend cannot decode {name}: {error}. Fix: another backend (vllm, sglang)"
        ) from error
    with torch.no_grad():
        whole = (
            model(input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(ours.device), use_cache=False)
            .logits[0, -1]
            .float()
        )
    # Room for bf16; another architecture's arithmetic is further off. equal_nan: broken weights are the sampler's to
    # report.
    if not torch.allclose(ours, whole, rtol=2e-2, atol=2e-2 * float(whole.abs().max()), equal_nan=True):
        raise EngineError(
            f"the hf backend's decoding of {name} differs from the model's own forward pass. Fix: another backend"
            " (vllm, sglang)"
        )


def load_into(model: nn.Module, folder: Path) -> None:
    """Copy the safetensors weights of a folder in Hugging Face layout into `model`, in place. Raises EngineError.

    Nothing is written before all names and shapes are verified. A tied tensor may come under any one of its names.
    """
    state, form = model.state_dict(), CheckpointForm(model)
    files = weight_files(folder)
    if not files or not all(path.is_file() for path in files):
        raise EngineError(f"no safetensors weights of a whole model in {folder}. Fix: export the model again")
    try:
        shapes = {name: (path, shape) for path in files for name, shape in _shapes(path)}
        _verify(state, form, {name: shape for name, (_, shape) in shapes.items()}, folder)
        # In the order of names, so that a fused tensor's parts, spread over files, come together.
        for bucket in units(_read(sorted((name, path) for name, (path, _) in shapes.items()))):
            with torch.no_grad():
                for name, tensor in form.own(bucket):
                    state[name].copy_(tensor)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"cannot read the weights in {folder}: {error}") from error


def stream_into(model: nn.Module, buckets: Iterable[Bucket]) -> None:
    """Copy a stream of weights into `model`, in place, cast to its dtype. Raises EngineError.

    Experts come one by one, as in checkpoints, a layer's in one bucket, or as transformers fuses them. Tensors are
    written as they come: one that the model does not have, of another shape, or missing at the end leaves a model that
    must not serve.
    """
    state, form = model.state_dict(), CheckpointForm(model)
    missing = set(state)
    for bucket in buckets:
        for name, tensor in bucket:
            if form.shapes.get(name) != tensor.shape:
                has = f"one of shape {tuple(form.shapes[name])}" if name in form.shapes else "none of that name"
                raise EngineError(
                    f"the trainer sent {name!r} of shape {tuple(tensor.shape)}, the model has {has}. Fix: one pretrain"
                    " for both"
                )
        with torch.no_grad():
            for name, tensor in form.own(bucket):
                state[name].copy_(tensor)
                missing.discard(name)
    if lacking := {part for name in missing for part in form.needs[name]}:
        raise EngineError(f"the trainer's weights lack {len(lacking)} of the model's tensors, such as {min(lacking)!r}")


def _read(places: Iterable[tuple[str, Path]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of several files in the order of `places`, one at a time."""
    with contextlib.ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, path in places:
            if path not in opened:
                opened[path] = stack.enter_context(safe_open(str(path), framework="pt"))
            yield name, opened[path].get_tensor(name)


def _shapes(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    with safe_open(str(path), framework="pt") as weights:
        return [(name, tuple(weights.get_slice(name).get_shape())) for name in weights.keys()]  # noqa: SIM118 - no mapping


def _verify(
    state: dict[str, torch.Tensor], form: CheckpointForm, offered: dict[str, tuple[int, ...]], folder: Path
) -> None:
    if unknown := offered.keys() - form.shapes.keys():
        raise EngineError(
            f"the weights in {folder} hold {len(unknown)} names that the model does not have, such as {min(unknown)!r}"
        )
    # By memory and not by name: a tied tensor is complete when any one of its names came.
    covered = {
        tensor.data_ptr()
        for name, tensor in state.items()
        if name in offered or offered.keys() >= set(form.needs[name])
    }
    lacking = [
        part
        for name, tensor in state.items()
        if tensor.data_ptr() not in covered
        for part in form.needs[name]
        if part not in offered
    ]
    if missing := list(dict.fromkeys(lacking)):
        raise EngineError(f"the weights in {folder} lack {len(missing)} of the model's tensors, such as {missing[0]!r}")
    for name, shape in offered.items():
        if shape != tuple(form.shapes[name]):
            raise EngineError(
                f"the weights in {folder} have {name!r} of shape {shape}, the model's is {tuple(form.shapes[name])}"
            )
