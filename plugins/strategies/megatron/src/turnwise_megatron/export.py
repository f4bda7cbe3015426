"""A model folder in Hugging Face layout, written from a stream of tensors on rank 0."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from turnwise.errors import CheckpointError
from turnwise_megatron.convert import VALUE_HEAD
from turnwise_torch.export import copy_all_but_weights, write_weights
from turnwise_torch.models import VALUE_HEAD_FILE, first_line, torch_dtype


def write_model(folder: Path, source: Path, weights: Iterable[tuple[str, Tensor]], dtype: str, tied: bool) -> None:
    """Write `weights`, and what else the folder `source` holds, to `folder`; a value head goes into a file of its own.
    Raises CheckpointError."""
    head: dict[str, Tensor] = {}

    def backbone() -> Iterable[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name in VALUE_HEAD:
                head[name.removeprefix("value_head.")] = tensor.contiguous()
            elif not (tied and name == "lm_head.weight"):
                yield name, tensor

    try:
        folder.mkdir(parents=True, exist_ok=True)
        copy_all_but_weights(source, folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # The older name of `dtype`: left in, two entries could disagree.
        config.pop("torch_dtype", None)
        config["dtype"] = str(torch_dtype(dtype)).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_weights(folder, backbone())
        if head:
            save_file(head, folder / VALUE_HEAD_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the model to {folder}: {first_line(error)}") from error
