"""LoRA adapters alone: read from the trainer's offer in this process, written as the PEFT folder that vLLM's workers
load."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from turnwise.contracts.train import Lora, Offer
from turnwise.errors import EngineError

NAME = "turnwise"
"""Under this name all requests ask for the adapters; updates replace what is behind it."""
NUMBER = 1
ZEROS = "zeros"
"""In the place of a folder: the adapters of before the first update."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `max_lora_rank`."""


def engine_arguments(lora: Lora) -> dict[str, Any]:
    """vLLM's arguments for one set of adapters of this rank, none of which is sent for it at the start."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank)}


class Folder:
    """The PEFT folder that vLLM reads: the adapters of the latest offer."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._member: Any = None  # a turnwise_torch.broadcast.Member

    def write(self, offer: Offer, timeout: float) -> Path:
        """The adapters of an offer, by whatever transport they come; blocks. Raises EngineError: the trainer is gone,
        or silent for `timeout` s."""
        if offer.transport == "safetensors":
            return Path(offer.payload["folder"])
        import torch

        from turnwise_torch.adapters import adapter_buckets
        from turnwise_torch.broadcast import Member
        from turnwise_torch.lora import write_adapter

        self._member = self._member or Member(torch.device("cpu"))
        with contextlib.closing(adapter_buckets(offer, self._member, timeout)) as buckets:
            # Clones, because the buckets are views of memory that the sender writes again.
            tensors = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
        if not tensors:
            raise EngineError("the weight update holds no adapters")
        self._path = self._path or Path(tempfile.mkdtemp(prefix="turnwise-vllm-adapters-"))
        write_adapter(self._path, offer.adapter or {}, tensors)
        return self._path

    def close(self) -> None:
        """Remove it, and leave the group that weights came by."""
        if self._member is not None:
            self._member.leave()
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
