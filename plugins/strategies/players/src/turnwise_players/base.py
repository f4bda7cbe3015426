"""What every player shares: messages in, text out, no weights, no device."""

from __future__ import annotations

from typing import Literal

from turnwise.contracts.inference import Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError


class Player:
    """The part of the contract of an inference backend that means nothing to a player."""

    input: Literal["ids", "messages"] = "messages"
    transports: tuple[str, ...] = ()

    def live(self, episodes: int) -> None:
        """A player answers each request at once."""

    async def receive(self, offer: Offer) -> int:
        """Raises EngineError: a player has no weights."""
        raise EngineError(
            f"{type(self).__name__} has no weights, so it cannot receive version {offer.version}. Fix: train with a model as actor_infer"
        )

    async def pause(self) -> None:
        """Nothing is sampled between two calls."""

    async def resume(self) -> None:
        """Nothing was stopped."""

    async def abort(self, request: Request) -> None:
        """Nothing is queued."""

    async def sleep(self) -> None:
        """A player holds no device memory."""

    async def wake(self) -> None:
        """Nothing was given back."""

    async def close(self) -> None:
        """Nothing to release."""


def answer(template: str, action: str) -> Generation:
    """The generation for `action`: text alone; a player has no token ids and no log-probs."""
    return Generation(text=template.replace("{action}", action), ids=None, logprobs=None, versions=None, finish="stop")
