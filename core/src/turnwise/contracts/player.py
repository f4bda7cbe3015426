"""What an inference backend without a model needs of its contract: players choose actions, and have neither tokens nor
weights."""

from __future__ import annotations

from typing import Literal

from turnwise.contracts.capabilities import Options
from turnwise.contracts.inference import DeviceMemory, InferenceContext, Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError, Problem


class Player:
    """A base class for players: only `generate` is left to write. Evaluation and `turnwise rollout` work with them,
    training does not."""

    input: Literal["ids", "messages"] = "messages"

    @staticmethod
    def transports(config: Options, context: InferenceContext) -> tuple[str, ...]:
        """None: a player has no weights."""
        return ()

    @staticmethod
    def check(config: Options, context: InferenceContext) -> list[Problem]:
        """Nothing is wrong with a player."""
        return []

    def receivers(self, transport: str) -> int:
        """Nobody reads an offer."""
        return 0

    def live(self, episodes: int) -> None:
        """A player answers each request at once."""

    async def receive(self, offer: Offer) -> int:
        """Raises EngineError: a player has no weights."""
        raise EngineError(
            f"{type(self).__name__} has no weights, so it cannot receive version {offer.version}. Fix: train with a"
            " model as actor_infer"
        )

    async def pause(self) -> None:
        """Nothing is sampled between two calls."""

    async def resume(self) -> None:
        """Nothing was stopped."""

    async def abort(self, request: Request) -> None:
        """Nothing is queued."""

    async def sleep(self) -> None:
        """A player holds no device memory."""

    async def wake(self, what: DeviceMemory) -> None:
        """Nothing was given back."""

    async def close(self) -> None:
        """Nothing to release."""


def chosen(action: str) -> Generation:
    """The generation of a player that chose `action`: managers take it as it is, and search no action in it."""
    return Generation(text=action, ids=None, logprobs=None, versions=None, finish="stop", extras={"action": action})
