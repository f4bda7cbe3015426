"""A strategy's own state in parts, one of each rank, in one folder: torch's distributed checkpoints, which any number
of ranks can read."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from turnwise.errors import CheckpointError
from turnwise_torch.guard import is_out_of_memory
from turnwise_torch.models import first_line
from turnwise_torch.state import checked

FACTS_FILE = "state.json"
FORMAT = "turnwise-torch parts 1"
# Reading damaged bytes may raise nearly anything, as pickle's documentation says.
_BROKEN = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ImportError,
    pickle.UnpicklingError,
)

Place = Callable[[str, torch.Size, torch.dtype], Tensor | None]
"""For a saved tensor's name, shape and dtype the tensor to read it into, or None where this rank does not want it."""


_CHECKPOINT = "torch.distributed.checkpoint"
_NAMED = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")
    ),
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
    ),
}
"""What the metadata of a state are made of, beside torch's dtypes."""


class _Foreign(Exception):
    """Metadata name something else: whatever a pickle names may be called while it is read."""


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """As of Unpickler, for what `_NAMED` holds. Raises _Foreign."""
        if (module, name) in _NAMED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise _Foreign(f"{module}.{name}")


class _Reader(FileSystemReader):
    """torch reads tensors without running code, and unpickles what describes them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As of FileSystemReader. Raises _Foreign."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Metadata(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"its metadata are a {type(metadata).__name__}")
        # What torch's own read_metadata does after unpickling; its planner relies on it.
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def write_parts(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write what this rank holds of the tensors, all ranks at once; plain tensors of one name count once. Raises
    CheckpointError."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            (Path(folder) / FACTS_FILE).write_text(json.dumps({"format": FORMAT, **facts}, indent=1), encoding="utf-8")
        dcp.save(dict(tensors), checkpoint_id=str(folder))
    except (OSError, CheckpointException) as error:
        cause = _cause(error)
        raise CheckpointError(f"cannot write the training state to {folder}: {first_line(cause)}") from error


def is_in_parts(folder: Path) -> bool:
    """Whether the state in the folder was written by several ranks."""
    return (Path(folder) / FACTS_FILE).is_file()


def read_parts(folder: Path, expected: Mapping[str, str], place: Place) -> dict[str, Tensor]:
    """The tensors that `place` gave, filled. All ranks at once, as many as there are. Raises CheckpointError as
    read_state, and what `place` raises."""
    source = f"the training state {folder}"
    try:
        checked(
            source, json.loads((Path(folder) / FACTS_FILE).read_text(encoding="utf-8")), {"format": FORMAT, **expected}
        )
        reader = _Reader(str(folder))
        tensors = {}
        for name, saved in reader.read_metadata().state_dict_metadata.items():
            tensor = place(name, saved.size, saved.properties.dtype)  # type: ignore[union-attr]
            if tensor is not None:
                tensors[name] = tensor
        with warnings.catch_warnings():
            # torch warns where one process reads what several wrote, which is meant here.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(dict(tensors), storage_reader=reader)
    except CheckpointError:  # of another run, and undamaged: it is a ValueError, too
        raise
    except (*_BROKEN, _Foreign, CheckpointException) as error:
        cause = _cause(error)
        if isinstance(cause, _Foreign):
            raise CheckpointError(
                f"{source} names {cause}, which no training state does, and was not read. Fix: resume from a checkpoint"
                " that this strategy saved"
            ) from None
        raise CheckpointError(
            f"{source} is cut short or damaged: {first_line(cause)}. Fix: resume from an older checkpoint"
        ) from error
    return tensors


def _cause(error: BaseException) -> BaseException:
    """Of a failure on several ranks the first. Raises it if memory ran out."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if is_out_of_memory(error):
        raise error
    return error
