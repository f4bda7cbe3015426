"""Weights on their way out: an offer says where to read them, sending serves those who read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from turnwise.contracts.train import Offer, TrainContext
from turnwise.errors import TrainerError
from turnwise_torch import lora, models
from turnwise_torch.broadcast import Broadcast, Hub
from turnwise_torch.export import remove
from turnwise_torch.stream import Sender, buckets

STREAMED = ("shared_memory", "process_group")


class Source(Protocol):
    """Whose weights are sent. Every method is called on all ranks at once."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors as checkpoints have them."""
        ...

    def adapter_config(self) -> dict[str, Any]:
        """PEFT's configuration of the adapters."""
        ...

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters' whole tensors under the names of PEFT's files."""
        ...

    def export(self, folder: Path) -> None:
        """The weights as a model folder, written by rank 0."""
        ...


class Sending:
    """What one process offers of `source`, one offer at a time. Only rank 0 talks to those who read; the other ranks
    gather with it."""

    def __init__(self, context: TrainContext, device: torch.device, source: Source) -> None:
        self._context, self._device, self._source = context, device, source
        self._sender: Sender | Broadcast | None = None
        self._hub: Hub | None = None
        self._folder: Path | None = None

    def offer(self, transport: str, version: int, receivers: int) -> Offer:
        """An offer by a streamed transport, or of a folder (`safetensors`), in place of the one before. Raises
        TrainerError, CheckpointError."""
        self._withdraw()
        adapter = self._source.adapter_config() if self._adapters_alone() else None
        if transport in STREAMED:
            self._sender = self.new_sender(transport, receivers) if self._first() else None
            return Offer(transport, version, self._sender.payload if self._sender else {}, adapter)
        return Offer(transport, version, {"folder": str(self._write(adapter))}, adapter)

    def send(self, offer: Offer) -> None:
        """Stream the weights of an offer in buckets of `bucket_bytes`; a folder is read by the backend. Raises
        TrainerError."""
        if offer.transport not in STREAMED:
            return
        weights = self._source.weights() if offer.adapter is None else self._source.adapter_weights()
        try:
            if self._first():
                if self._sender is None:
                    raise TrainerError(
                        f"{self._context.role} was asked to send version {offer.version}, which it does not offer"
                    )
                self._sender.send(buckets(weights, self._context.bucket_bytes))
        finally:
            # The other ranks gather on: their collectives must meet.
            for _ in weights:
                pass
            self._withdraw()

    def close(self) -> None:
        """Withdraw what is on offer; may be called twice."""
        self._withdraw()
        if self._hub is not None:
            self._hub.close()
        remove(self._folder)
        self._folder = None

    def new_sender(self, transport: str, receivers: int) -> Sender | Broadcast:
        """The sender of one offer; the group of `process_group` outlives it."""
        if transport == "shared_memory":
            return Sender(receivers, self._context.weight_sync_timeout)
        if self._hub is None:
            self._hub = Hub(self._context.ranks.address, self._device, self._context.weight_sync_timeout)
        return self._hub.sender(receivers)

    def _write(self, adapter: dict[str, Any] | None) -> Path | None:
        """A new folder of the weights, or of the adapters alone, valid until the next; on rank 0."""
        # On all ranks, before one can fail.
        tensors = dict(self._source.adapter_weights()) if adapter else {}
        previous, self._folder = (
            self._folder,
            Path(tempfile.mkdtemp(prefix="turnwise-weights-")) if self._first() else None,
        )
        try:
            if adapter is None:
                self._source.export(self._folder or Path())
            elif self._folder is not None:
                lora.write_adapter(self._folder, adapter, tensors)
        except (OSError, SafetensorError) as error:
            raise TrainerError(
                f"weight update: cannot write the adapters to {self._folder}: {models.first_line(error)}"
            ) from error
        finally:
            remove(previous)
        return self._folder

    def _adapters_alone(self) -> bool:
        context = self._context
        return context.trainable and context.lora is not None and context.lora.sync == "adapter"

    def _first(self) -> bool:
        return self._context.ranks.rank == 0

    def _withdraw(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
