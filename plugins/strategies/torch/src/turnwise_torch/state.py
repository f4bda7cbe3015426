"""A strategy's own state on disk: tensors in one safetensors file, so that resuming continues to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from turnwise.errors import CheckpointError
from turnwise_torch.models import first_line

STATE_FILE = "state.safetensors"
FORMAT = "turnwise-torch 1"


def write_state(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write tensors and facts (strings) to `folder`, which is made if needed. Raises CheckpointError (disk full, not
    writable)."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, Path(folder) / STATE_FILE, {"format": FORMAT, **facts})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the training state to {folder}: {first_line(error)}") from error


def read_state(folder: Path, expected: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and facts of `folder`. Raises CheckpointError: missing, cut short, damaged, or facts other than
    `expected`."""
    file = Path(folder) / STATE_FILE
    if not file.is_file():
        raise CheckpointError(
            f"there is no training state in {folder} (no {STATE_FILE}). Fix: resume from a checkpoint that this"
            " strategy saved"
        )
    try:
        with safe_open(file, "pt") as opened:
            facts = dict(opened.metadata() or {})
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (a handle, not a mapping)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"the training state {file} is cut short or damaged: {first_line(error)}. Fix: resume from an older"
            " checkpoint"
        ) from error
    return tensors, checked(f"the training state {file}", facts, {"format": FORMAT, **expected})


def checked(source: str, facts: dict[str, str], expected: Mapping[str, str]) -> dict[str, str]:
    """The facts. Raises CheckpointError if one is not as expected."""
    for name, value in expected.items():
        if facts.get(name) != value:
            raise CheckpointError(
                f"{source} was saved with {name} {facts.get(name)!r}, this run has {value!r}. Fix: resume from a"
                " checkpoint of the same run"
            )
    return facts
