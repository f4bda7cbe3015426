"""A player of `rlvr` without a model that gives the known answer: what a perfect model would score."""

from __future__ import annotations

from turnwise.contracts.inference import InferenceContext, Request
from turnwise.contracts.player import Player, chosen
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError


class KnownAnswer(Player):
    """The inference backend `known_answer`: the first of the legal actions, where `rlvr` puts the known answer."""

    def __init__(self, config: None, context: InferenceContext) -> None:
        """Neither option nor context matters to it."""

    async def generate(self, request: Request) -> Generation:
        """The first of `request.actions`. Raises EngineError if the environment gave none."""
        if not request.actions:
            raise EngineError(
                "the environment gave no legal action, known_answer. Fix: play rlvr, which gives the known answer."
            )
        return chosen(request.actions[0])
