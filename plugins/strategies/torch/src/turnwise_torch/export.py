"""A model folder in Hugging Face layout, written from a stream of tensors: never a second copy of the whole model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from turnwise.errors import CheckpointError
from turnwise_torch import lora, models
from turnwise_torch.stream import buckets

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")
# One file's tensors are held in main memory while it is written.
FILE_BYTES = 4 * 2**30


def write_model(
    folder: Path,
    source: Path,
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    head: dict[str, Tensor] | None = None,
    adapters: dict[str, Tensor] | None = None,
) -> None:
    """Write `weights` in the model's dtype, its config, and what else the folder `source` holds (tokenizer, templates)
    to `folder`.

    Of tensors that share memory in `model` only the first name is written, as transformers does. A value head goes into
    a file of its own (`head`: its whole tensors, where the model holds parts of them), adapters, already added to the
    weights, into a folder of their own beside them. Raises CheckpointError.
    """
    whole: Any = model.backbone if isinstance(model, models.ValueModel) else model
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # First, so that the configuration of the model as it is now replaces the folder's own config.json.
        copy_all_but_weights(source, folder)
        whole.config.save_pretrained(folder)
        tied = models.tied_names(whole)
        write_weights(folder, ((name, tensor) for name, tensor in weights if name not in tied))
        if isinstance(model, models.ValueModel):
            save_file(head or dict(model.value_head.state_dict()), folder / models.VALUE_HEAD_FILE)
        if adapters:
            lora.write_adapter(folder / lora.ADAPTER_FOLDER, lora.peft_config(model, source), adapters)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the model to {folder}: {models.first_line(error)}") from error


def copy_all_but_weights(source: Path, folder: Path) -> None:
    """Copy the files of a model folder that hold no weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not any(file.match(pattern) for pattern in WEIGHT_FILES):
            shutil.copyfile(file, folder / file.name)


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], size: int = FILE_BYTES) -> None:
    """One `model.safetensors`, or several files of about `size` bytes with their index."""
    files: dict[str, list[str]] = {}
    total = 0
    # A file's worth of gathered tensors would fill the device.
    held = ((name, tensor.detach().cpu()) for name, tensor in weights)
    # Buckets keep a decoder layer in one file; their number is known only at the end, hence the renaming below.
    for number, bucket in enumerate(buckets(held, size), 1):
        file = f"model-{number:05d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in bucket}, folder / file, {"format": "pt"})
        files[file] = [name for name, _ in bucket]
        total += sum(tensor.nbytes for _, tensor in bucket)
    if len(files) == 1:
        (folder / next(iter(files))).rename(folder / "model.safetensors")
        return
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def remove(folder: Path | None) -> None:
    """Remove a folder that was written for a backend."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
