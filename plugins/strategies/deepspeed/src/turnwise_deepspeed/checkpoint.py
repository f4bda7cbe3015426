"""The state of a role on disk: DeepSpeed's checkpoint, and beside it each process's random state with what it belongs
to."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from turnwise.contracts.train import TrainContext
from turnwise.errors import CheckpointError
from turnwise_deepspeed.variables import variable
from turnwise_torch.guard import is_out_of_memory
from turnwise_torch.models import first_line
from turnwise_torch.state import read_state, write_state

TAG = "deepspeed"
_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# What torch and DeepSpeed raise of files that are cut short or damaged.
_BROKEN = (OSError, RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, AssertionError)


def facts(model: nn.Module, context: TrainContext, stage: int) -> dict[str, str]:
    """What a state belongs to. `model` still has its whole parameters."""
    # By names and shapes and not by the folder: the same model may have moved.
    shapes = "\n".join(f"{name} {list(p.shape)} {p.requires_grad}" for name, p in model.named_parameters())
    return {
        "processes": str(context.ranks.size),
        "zero_stage": str(stage),
        "head": context.head,
        "dtype": context.dtype,
        "trainable": str(context.trainable),
        "parameters": hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest(),
    }


def save(folder: Path, engine: Any, context: TrainContext, expected: dict[str, str], device: torch.device) -> None:
    """Write this process's part to `folder`; all processes of the role do. A reference has its weights from the model's
    folder, and saves its random state alone."""
    if context.trainable:
        try:
            engine.save_checkpoint(str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=_partly(engine))
        except (OSError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise CheckpointError(f"cannot write the training state to {folder}: {first_line(error)}") from error
    rng = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rng["rng/cuda"] = torch.cuda.get_rng_state(device)
    # Last: a save that broke off has no facts, and so is no checkpoint.
    write_state(folder / _part(context.ranks.rank), rng, expected)


def load(folder: Path, engine: Any, context: TrainContext, expected: dict[str, str], device: torch.device) -> None:
    """Undo `save`. Raises CheckpointError."""
    # Rank 0's part first, for it is there whatever the number of processes was; it says what differs.
    first = read_state(folder / _part(0), {name: value for name, value in expected.items() if name != "parameters"})[1]
    if first.get("parameters") != expected["parameters"]:
        raise CheckpointError(
            f"the training state in {folder} belongs to another model than {context.model}. Fix: the pretrain of"
            " that run"
        )
    tensors, _ = read_state(folder / _part(context.ranks.rank), expected)
    if context.trainable:
        try:
            with _tensors_and_numbers_alone():
                path, _ = engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=not _partly(engine))
        except pickle.UnpicklingError as error:  # torch's advice is to read it all the same
            raise CheckpointError(
                f"the training state in {folder} holds more than tensors and numbers, and was not read. "
                "Fix: resume from a checkpoint that this strategy saved"
            ) from error
        except _BROKEN as error:
            if is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"the training state in {folder} is cut short or damaged: {first_line(error)}. Fix: resume from an"
                " older checkpoint"
            ) from error
        if path is None:
            raise CheckpointError(
                f"there is no training state in {folder}. Fix: resume from a checkpoint that this strategy saved"
            )
    torch.set_rng_state(tensors["rng/cpu"])
    if "rng/cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng/cuda"], device)


@contextmanager
def _tensors_and_numbers_alone() -> Iterator[None]:
    """torch.load refuses meanwhile what may run code. DeepSpeed asks for all of a pickle, in several places: only
    torch's variable overrules it."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # What DeepSpeed's own checkpoints hold beside tensors and numbers.
    known = torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address])
    with variable(_FORCED, "1"), known:
        yield


def _part(rank: int) -> str:
    return f"process-{rank}"


def _partly(engine: Any) -> bool:
    """Whether some parameters are not trained: they come from the model's folder and are not saved."""
    return not all(parameter.requires_grad for parameter in engine.module.parameters())
