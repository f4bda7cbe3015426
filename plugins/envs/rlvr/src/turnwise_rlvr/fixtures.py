"""What the conformance kit needs to build the environment and its player."""

from __future__ import annotations

from typing import Any

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request


def environment_fixture() -> dict[str, Any]:
    """`env_config`: generated questions, two tries each."""
    return {"env_config": {"data": {"generate": "arithmetic", "count": 50}, "rewards": "exact", "tries": 2}}


def _request(seed: int = 0) -> Request:
    """A question of its own for each seed: the player draws nothing."""
    message = {"role": "user", "content": f"{seed} + 3 ="}
    return Request(seed, GeneratingArgs(), 16, messages=(message,), actions=(str(seed + 3), "0", "1"))


def player_fixture() -> dict[str, Any]:
    """`config`, `context`, and `request(seed)`: a Request whose first action is the answer."""
    return {"config": None, "context": InferenceContext(None, None), "request": _request}
