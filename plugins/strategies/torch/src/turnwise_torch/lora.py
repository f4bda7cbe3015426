"""Which parameters of a model are trained: all, all but frozen ones, or low-rank adapters; and the model's tensors as
one without adapters."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from turnwise.contracts.train import Lora, TrainContext
from turnwise.errors import ConfigError, Problem, did_you_mean, listed
from turnwise_torch.models import ValueModel, first_line

# PEFT's name for the only adapter: part of parameters' names in the model, and left out of those in its files.
ADAPTER = "default"
ADAPTER_FOLDER = "adapter"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# A text of names (the form that the field's YAMLs use), apart from a regular expression and from `all-linear`, which
# has a hyphen.
_NAMES = re.compile(r"[\w.]+(\s*,\s*[\w.]+)*")

Gather = Callable[[Tensor], Tensor]
"""From a parameter, of which ranks may hold parts, to the whole tensor; called by all ranks, in the same order."""


def problems(context: TrainContext) -> list[Problem]:
    """What a strategy's `check` says of adapters: their package is asked for without importing it."""
    if context.lora is None or not context.trainable or importlib.util.find_spec("peft") is not None:
        return []
    return [
        Problem(
            f"{context.role}.model_args.lora_rank",
            "needs the package peft. Fix: pip install 'turnwise-torch[lora]'",
            machine=True,
        )
    ]


def choose_trained(model: nn.Module, context: TrainContext) -> None:
    """Put adapters into the model if the context names any, and set `requires_grad` everywhere.

    A frozen role trains nothing and has no adapters: as a reference it is the actor with its adapters off. With
    adapters they alone are trained, and a value head. Parameters whose names begin with one of `context.frozen` are
    not; see `beginnings` for the names.
    Raises ConfigError: modules or prefixes that the model does not have, or nothing left to train.
    """
    lora = context.lora if context.trainable else None
    # Before the loop below, which has to see the adapters' parameters.
    if lora is not None:
        _add_adapters(model, lora, context.role)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            context.trainable and (lora is None or _is_adapter(name) or name.startswith("value_head."))
        )
    if not context.trainable:
        return
    for prefix in context.frozen:
        _freeze(model, prefix, context.role)
    if not any(p.requires_grad for p in model.parameters()):
        place = f"{context.role}.model_args.freeze_module_prefix"
        raise ConfigError([f"{place}: {listed(context.frozen)} leaves nothing to train. Fix: freeze less"])


def beginnings(model: nn.Module, name: str) -> tuple[str, ...]:
    """The names by which a prefix may call a parameter: its own; of one in the backbone also those with and without
    `model.` before it."""
    # PEFT puts an adapted layer's own weight below base_layer; users name it as their checkpoint does.
    name = name.replace(".base_layer.", ".")
    inside = f"{model.backbone.base_model_prefix}." if isinstance(model, ValueModel) else f"{model.base_model_prefix}."
    own = "backbone." if isinstance(model, ValueModel) else inside
    return (name, name.removeprefix(own), inside + name.removeprefix(own)) if name.startswith(own) else (name,)


def initial_values(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """float32 starting values of the adapters, by name: A uniform as of a linear layer, B zeros (Hu et al. 2021,
    section 4.1).

    They depend on `seed` and the order of the modules alone: not on dtype, device or the number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, parameter in model.named_parameters():
        if not _is_adapter(name):
            continue
        out[name] = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            # nn.Linear and PEFT say kaiming_uniform_(a=√5), which is ±1/√fan-in; A is [rank, fan-in].
            bound = 1 / math.sqrt(parameter.shape[1])
            out[name].uniform_(-bound, bound, generator=generator)
    return out


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters meanwhile; which parameters train is left alone, as sharding engines need."""
    # PEFT's own switch (enable_adapters) sets requires_grad as well.
    layers = [layer for _, layer in _adapted(model)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def whole_tensors(model: nn.Module, gather: Gather, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The state dict of a model as if it had no adapters: each is added to its layer's weight (in float32, then rounded
    to `dtype`).

    One tensor at a time, new ones: the trained parameters stay as they are. Floating parameters leave in `dtype`,
    buffers as they are.
    """
    layers = dict(_adapted(model))
    # Without keep_vars everything comes detached, and a parameter looks like a buffer.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if _is_adapter(name):
            continue
        whole = gather(tensor).detach()
        layer = layers.get(name.rpartition(".base_layer.")[0])
        if layer is not None and name.endswith(".base_layer.weight"):
            # Rounded once, after the sum: in 16 bits a small adapter would vanish beside the weight.
            whole = whole.to(torch.promote_types(whole.dtype, torch.float32)) + _delta(layer, gather)
        if isinstance(tensor, nn.Parameter) and whole.is_floating_point():
            whole = whole.to(dtype)
        yield name.replace(".base_layer.", "."), whole


def adapter_tensors(model: nn.Module, gather: Gather) -> dict[str, Tensor]:
    """The adapters' tensors under the names of PEFT's files; empty without adapters."""
    return dict(each_adapter(model, gather))


def each_adapter(model: nn.Module, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """The adapters' tensors under the names of PEFT's files, one at a time."""
    for name, parameter in adapter_parameters(model).items():
        yield name, gather(parameter).detach().contiguous()


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters under the names of PEFT's files; empty without adapters."""
    named = _backbone(model).named_parameters()
    return {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": p for name, p in named if _is_adapter(name)}


def peft_config(model: nn.Module, base: Path) -> dict[str, Any]:
    """What PEFT's adapter_config.json holds of the model's adapters; `base`: the folder of the model they are for."""
    backbone: Any = _backbone(model)
    config = backbone.peft_config[ADAPTER].to_dict() | {"base_model_name_or_path": str(base), "inference_mode": True}
    # PEFT's sets become lists, its enumerations texts.
    plain: dict[str, Any] = json.loads(json.dumps(config, default=sorted))
    return plain


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write adapters as PEFT does, for `PeftModel.from_pretrained`; `config`: their `peft_config`. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(dict(tensors), folder / ADAPTER_WEIGHTS, {"format": "pt"})


def _add_adapters(model: nn.Module, lora: Lora, role: str) -> None:
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear

    task = "FEATURE_EXTRACTION" if isinstance(model, ValueModel) else "CAUSAL_LM"
    backbone: Any = _backbone(model)
    place = f"{role}.model_args.lora_target"
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=_targets(lora), task_type=task)
    try:
        # In place: a PeftModel around the backbone would be another class, with base_model.model before every name.
        inject_adapter_in_model(config, backbone, ADAPTER)
    except ValueError as error:
        linear = {name.rpartition(".")[2] for name, module in backbone.named_modules() if isinstance(module, nn.Linear)}
        raise ConfigError(
            f"{place}: {first_line(error)} Linear layers of {type(backbone).__name__}: {listed(sorted(linear))}. Fix: name"
            " some of them"
        ) from error
    ends = (backbone.get_input_embeddings(), backbone.get_output_embeddings())
    for name, layer in _adapted(backbone):
        if layer in ends or not isinstance(layer, Linear):
            kind = type(layer.base_layer).__name__
            text = f"{name} is a {kind}, adapters are for the linear layers of the backbone. Fix: leave it out"
            raise ConfigError([f"{place}: {text}"])


def _targets(lora: Lora) -> Any:
    """As PEFT takes it: None (its choice for the architecture), `all-linear`, a list of names, or a regular
    expression."""
    if not isinstance(lora.target, str):
        return None if lora.target is None else list(lora.target)
    # PEFT compares names of a list with the ends of modules' names, and a text as a regular expression with the whole.
    return [name.strip() for name in lora.target.split(",")] if _NAMES.fullmatch(lora.target) else lora.target


def _freeze(model: nn.Module, prefix: str, role: str) -> None:
    found = False
    for name, parameter in model.named_parameters():
        if any(known.startswith(prefix) for known in beginnings(model, name)):
            parameter.requires_grad_(False)
            found = True
    if not found:
        names = (beginnings(model, name)[-2:][0] for name, _ in model.named_parameters())
        known = sorted({re.sub(r"(\.\d+\..*|\.weight|\.bias)$", "", name) for name in names})
        text = f"no parameter begins with {prefix!r}.{did_you_mean(prefix, known)} There are: {listed(known)}"
        raise ConfigError([f"{role}.model_args.freeze_module_prefix: {text}"])


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            yield name, module


def _is_adapter(name: str) -> bool:
    return f".{ADAPTER}." in name and ".lora_" in name


def _delta(layer: Any, gather: Gather) -> Tensor:
    a, b = (gather(part[ADAPTER].weight).detach() for part in (layer.lora_A, layer.lora_B))
    wide = torch.promote_types(a.dtype, torch.float32)
    delta = b.to(wide) @ a.to(wide) * layer.scaling[ADAPTER]
    # Layers such as GPT-2's Conv1D hold their weight transposed.
    return delta.T if layer.fan_in_fan_out else delta


def _backbone(model: nn.Module) -> nn.Module:
    return model.backbone if isinstance(model, ValueModel) else model
