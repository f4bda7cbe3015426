"""Whether an offer of weights is one that a backend can take."""

from __future__ import annotations

from collections.abc import Iterable

from turnwise.contracts.train import Lora, Offer
from turnwise.errors import EngineError, listed


def check_offer(offer: Offer, engine: str, transports: Iterable[str], lora: Lora | None) -> None:
    """Raises EngineError: a transport that is none of the backend's, or adapters alone for an engine of whole weights,
    or the other way round."""
    if offer.transport not in (known := tuple(transports)):
        raise EngineError(
            f"the {engine.lower()} backend cannot receive weights by {offer.transport!r}. Known: {listed(known)}"
        )
    if (offer.adapter is None) != (lora is None):
        brings, wants = (
            ("whole weights", "adapters alone") if offer.adapter is None else ("adapters alone", "whole weights")
        )
        raise EngineError(
            f"the weight update brings {brings}, and {engine} was started for {wants}. Fix: one lora_sync for both"
            " sides"
        )
