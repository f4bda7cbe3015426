"""What the conformance kit needs to build the players: their options, a context without a model, a request they can
answer."""

from __future__ import annotations

import io
from typing import Any

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise_players.config import HumanConfig
from turnwise_players.human_player import HumanPlayer


def _request(seed: int = 0) -> Request:
    return Request(
        seed,
        GeneratingArgs(),
        16,
        messages=({"role": "user", "content": "Which way?"},),
        actions=("Left", "Right", "Up", "Down"),
    )


def random_fixture() -> dict[str, Any]:
    """`config`, `context`, and `request(seed)`: a Request with messages and legal actions."""
    return {"config": None, "context": InferenceContext(None, None), "request": _request}


def human_fixture() -> dict[str, Any]:
    """As `random_fixture`, with `backend`: a player whose keyboard is a text of many lines `Left`."""
    player = HumanPlayer(HumanConfig(), None, reader=io.StringIO("Left\n" * 1000), writer=io.StringIO())
    return {"config": HumanConfig(), "context": InferenceContext(None, None), "request": _request, "backend": player}
