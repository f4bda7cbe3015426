"""A plugin for `asynchronous.py`: FrozenLake whose steps wait as a remote environment's do, without using the CPU."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from turnwise import Implementation, hookimpl
from turnwise_gymnasium.frozen_lake import FrozenLake

SHORTEST, LONGEST = 0.020, 2.0


class WaitingLake(FrozenLake):
    """Every step takes from 20 ms to 2 s more, drawn from a log-normal distribution (median 60 ms), the same for the
    same seed."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As FrozenLake's, at once."""
        self._waits = np.random.default_rng(seed)
        return super().reset(seed=seed, options=options)

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        """As FrozenLake's, later."""
        await asyncio.sleep(float(np.clip(self._waits.lognormal(np.log(0.060), 1.2), SHORTEST, LONGEST)))
        return super().step(action)


@hookimpl
def environments() -> list[Implementation]:
    """`waiting_lake`."""
    return [Implementation("waiting_lake", WaitingLake, summary="FrozenLake with a remote environment's latency")]
