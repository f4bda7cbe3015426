"""The random player: uniform over the legal actions of each request, by the request's seed."""

from __future__ import annotations

import numpy as np

from turnwise.contracts.inference import InferenceContext, Request
from turnwise.contracts.player import Player, chosen
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError


class RandomPlayer(Player):
    """The baseline that every trained model must beat."""

    def __init__(self, config: None, context: InferenceContext) -> None:
        """It has no options, and nothing of the context matters to it."""

    async def generate(self, request: Request) -> Generation:
        """One of `request.actions`. Raises EngineError if the environment gave none."""
        if not request.actions:
            where = f" of {request.tag}" if request.tag else ""
            raise EngineError(
                f"the random player knows no legal action: the environment{where} gave none. "
                "Fix: put the legal texts into info['actions'] at reset and at every step"
            )
        # abs and the sign: a SeedSequence takes no negative number, and −1 and 1 are two seeds.
        generator = np.random.default_rng([abs(request.seed), int(request.seed < 0)])
        return chosen(request.actions[int(generator.integers(len(request.actions)))])
