"""What the conformance kit needs to build the bridge and the walker."""

from __future__ import annotations

from typing import Any

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request


def bridge_fixture() -> dict[str, Any]:
    """`env_config`: options for the bridge."""
    return {"env_config": {"env_id": "CartPole-v1", "action_names": ["Left", "Right"]}}


def _request(seed: int = 0) -> Request:
    message = {"role": "user", "content": "The goal is 2 down 1 right.\nHoles: Down."}
    return Request(seed, GeneratingArgs(), 16, messages=(message,), actions=("Left", "Down", "Right", "Up"))


def walker_fixture() -> dict[str, Any]:
    """`config`, `context`, and `request(seed)`: a Request that the walker can answer."""
    return {"config": None, "context": InferenceContext(None, None), "request": _request}
