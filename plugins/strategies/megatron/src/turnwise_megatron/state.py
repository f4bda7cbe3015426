"""Checkpoints, a folder for each process in one folder, exact for one parallel layout."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from turnwise.errors import CheckpointError
from turnwise_megatron.model import is_expert
from turnwise_megatron.optimizer import Optimizer
from turnwise_megatron.parallel import Parallel
from turnwise_torch.state import STATE_FILE, read_state, write_state


def part(folder: Path, rank: int) -> Path:
    """Where a process writes."""
    return Path(folder) / f"rank-{rank:05d}"


@frozen(eq=False)
class Held:
    """What a process keeps of a role. `distributed`: whether masters and moments are cut over the data parallel ranks;
    `facts`: what a state belongs to."""

    model: nn.Module
    optimizer: Optimizer | None
    parallel: Parallel
    distributed: bool
    facts: Mapping[str, str]


def save(folder: Path, held: Held) -> None:
    """Weights and optimizer state that no other process writes, and the random state. Raises CheckpointError."""
    model, optimizer, parallel = held.model, held.optimizer, held.parallel
    tensors = {f"rng/{name}": state for name, state in _random_states(model).items()}
    first = {expert: parallel.holders(expert)[0] == 0 for expert in (False, True)}
    # Written once, by the first of those that hold the same: data and context parallel ranks share weights, expert
    # parallel ones do not share experts.
    tensors |= {
        f"model/{name}": parameter for name, parameter in model.named_parameters() if first[is_expert(parameter)]
    }
    if optimizer is not None:
        # A distributed optimizer cuts masters and moments over the data parallel ranks: everyone has a part of its own.
        written = {number for number, expert in enumerate(optimizer.expert) if held.distributed or first[expert]}
        tensors |= _optimizer_state(model, optimizer, written)
    write_state(part(folder, parallel.rank), tensors, held.facts)


def load(folder: Path, held: Held) -> None:
    """Undo `save`, in place. Raises CheckpointError: missing, damaged, of another layout or model."""
    model, optimizer, parallel, facts = held.model, held.optimizer, held.parallel, held.facts
    # First, by rank 0's part alone: under another layout this rank's file may not exist, which would hide the reason.
    _check_layout(folder, facts)
    own, _ = read_state(part(folder, parallel.rank), facts)
    owners = {expert: parallel.holders(expert)[1] for expert in (False, True)}
    read = {parallel.rank: own} | {
        rank: read_state(part(folder, rank), facts)[0] for rank in {*owners.values()} - {parallel.rank}
    }
    parameters = dict(model.named_parameters())
    saved = {name.removeprefix("model/") for tensors in read.values() for name in tensors if name.startswith("model/")}
    found = {name: read[owners[is_expert(parameter)]] for name, parameter in parameters.items()}
    weights = {name: tensors[f"model/{name}"] for name, tensors in found.items() if f"model/{name}" in tensors}
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    if saved != parameters.keys() or shapes != {name: parameter.shape for name, parameter in parameters.items()}:
        raise CheckpointError(f"the training state in {folder} belongs to another model. Fix: the pretrain of that run")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        if optimizer is not None:
            _restore_optimizer(
                optimizer, [own if held.distributed else read[owners[expert]] for expert in optimizer.expert]
            )
    torch.set_rng_state(own["rng/cpu"])
    if "rng/cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["rng/cuda"])


def _check_layout(folder: Path, facts: Mapping[str, str]) -> None:
    file = part(folder, 0) / STATE_FILE
    if not file.is_file():
        raise CheckpointError(
            f"there is no training state of strategy megatron in {folder} (no {file.relative_to(folder)}). Fix: a"
            " checkpoint that it saved"
        )
    try:
        with safe_open(file, "pt") as opened:
            found = dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the training state {file} is cut short or damaged. Fix: resume from an older checkpoint"
        ) from error
    if found.get("layout") != facts["layout"]:
        raise CheckpointError(
            f"the training state in {folder} is of the layout {found.get('layout')}, this run has {facts['layout']}. "
            "Fix: the parallel sizes of that run, or start from its exported weights"
        )


def _random_states(model: nn.Module) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if next(model.parameters()).is_cuda:
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _optimizer_state(model: nn.Module, optimizer: Optimizer, written: Container[int]) -> dict[str, Tensor]:
    """Moments of the masters whose numbers are `written`, and those of them that are not the model's own memory."""
    shared = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    out = {}
    masters = {number: master for number, master in enumerate(optimizer.masters) if number in written}
    for number, master in masters.items():
        # A 32-bit model is its own master, and is written as the model.
        if master.untyped_storage().data_ptr() not in shared:
            out[f"master/{number}"] = master
    for adam in optimizer.adams:
        for number, master in masters.items():
            out |= {
                f"state/{number}/{key}": value
                for key, value in adam.state.get(master, {}).items()
                if isinstance(value, Tensor)
            }
        out |= {
            f"group/{number}/step": torch.tensor(group["step"])
            for number, group in enumerate(adam.param_groups)
            if "step" in group
        }
    return out


def _restore_optimizer(optimizer: Optimizer, sources: Sequence[Mapping[str, Tensor]]) -> None:
    """`sources`: for each master the tensors that were saved with it."""
    for number, (master, tensors) in enumerate(zip(optimizer.masters, sources, strict=True)):
        if f"master/{number}" in tensors:
            master.copy_(tensors[f"master/{number}"])
    steps = {name: tensor for tensors in sources for name, tensor in tensors.items() if name.startswith("group/")}
    for adam in optimizer.adams:
        # A master without saved moments has none after the load, either.
        adam.state.clear()
        for number, (master, tensors) in enumerate(zip(optimizer.masters, sources, strict=True)):
            prefix = f"state/{number}/"
            held = {
                name.removeprefix(prefix): tensor.clone() for name, tensor in tensors.items() if name.startswith(prefix)
            }
            if held:
                # Adam counts its steps on the CPU.
                adam.state[master] = {
                    key: value if key == "step" else value.to(master.device) for key, value in held.items()
                }
        for number, group in enumerate(adam.param_groups):
            # Apex and Transformer Engine count a group's steps.
            if "step" in group or f"group/{number}/step" in steps:
                group["step"] = int(steps[f"group/{number}/step"]) if f"group/{number}/step" in steps else 0
