"""What the tests of the real engine share: marks, and waiting for responses that are under way."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import pytest

from turnwise.contracts.inference import Request

MISSING = "vllm is not installed (extra: turnwise-vllm[vllm] or [cpu])"
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=MISSING)
# vLLM and what it imports warn of their own accord.
WARNS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::ResourceWarning"
)
# In this process it leaves sockets behind as well.
IN_PROCESS = [WARNS, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
CLOSE, FAR = 1e-4, 1e-2


async def under_way(lab: Any, responses: int, more: int) -> None:
    """Wait until there are so many responses, and each has so many tokens more than now; none may end meanwhile."""
    # The backend gets whole responses; what has come of each is counted in vLLM's part of this process alone.
    states = lab.backend.engine._llm.output_processor.request_states
    begun: dict[str, int] = {}
    async with asyncio.timeout(60):
        while True:
            now = {name: state.detokenizer.num_output_tokens() for name, state in list(states.items())}
            begun = now | begun
            assert begun.keys() == now.keys(), "a response has ended"
            if len(now) == responses and all(now[name] >= begun[name] + more for name in now):
                return
            await asyncio.sleep(0.001)


def across(lab: Any, requests: list[Request], *models: Any) -> list[Any]:
    """The answers to requests under which these weights come, one after the other, always between two tokens."""

    async def scene() -> list[Any]:
        tasks = [asyncio.create_task(lab.backend.generate(request)) for request in requests]
        for model in models:
            await under_way(lab, len(requests), 5)
            await lab.send(model.state_dict().items())
        return await asyncio.gather(*tasks)

    return lab.runner.run(scene())
