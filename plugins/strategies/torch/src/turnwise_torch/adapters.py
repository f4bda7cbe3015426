"""Adapters alone, as a backend reads them from an offer (turnwise.contracts.train.Offer.adapter)."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from turnwise.contracts.train import Offer
from turnwise.errors import EngineError
from turnwise_torch.broadcast import Member
from turnwise_torch.lora import ADAPTER_WEIGHTS
from turnwise_torch.models import first_line
from turnwise_torch.stream import Bucket, receive


def adapter_buckets(offer: Offer, member: Member, timeout: float) -> Generator[Bucket, None, None]:
    """The tensors of an offer of adapters alone, by whatever transport they come, each valid until the next bucket;
    blocks.

    Closed early, the trainer stops sending. Raises EngineError: nothing to read, or the trainer is gone or silent for
    `timeout` seconds.
    """
    if offer.transport == "shared_memory":
        yield from receive(offer.payload, timeout)
    elif offer.transport == "process_group":
        yield from member.receive(offer.payload, timeout)
    else:
        path = Path(offer.payload["folder"]) / ADAPTER_WEIGHTS
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"cannot read the adapters in {path.parent}: {first_line(error)}") from error
        yield list(tensors.items())
