"""What the tests of the real engine share: marks, and waiting for responses that are under way."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import pytest

MISSING = "vllm is not installed (extra: turnwise-vllm[vllm] or [cpu])"
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=MISSING)
# vLLM and what it imports warn of their own accord.
WARNS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::ResourceWarning"
)
# In this process it leaves sockets behind as well.
IN_PROCESS = [WARNS, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
CLOSE, FAR = 1e-4, 1e-2


async def under_way(lab: Any, responses: int, tokens: int) -> None:
    """Wait until so many responses have so many tokens each, and none has ended."""
    # The backend gets whole responses; what has come of each is counted in vLLM's part of this process alone.
    states = lab.backend.engine._llm.output_processor.request_states
    async with asyncio.timeout(60):
        while len(now := list(states.values())) < responses or any(
            state.detokenizer.num_output_tokens() < tokens for state in now
        ):
            await asyncio.sleep(0.001)
