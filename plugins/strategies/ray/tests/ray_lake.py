"""A plugin for the tests: the torch strategy, the hf backend and FrozenLake, each of which ends its process once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ray

from turnwise import Implementation, hookimpl
from turnwise_gymnasium.frozen_lake import FrozenLake
from turnwise_hf.backend import HfBackend
from turnwise_hf.config import HfConfig
from turnwise_torch.config import TorchConfig
from turnwise_torch.strategy import TorchStrategy


def _end(who: str) -> None:
    """Once per run: `graves` is in its folder, where all processes begin."""
    try:
        os.close(os.open(Path("graves") / who, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class MortalTrainer(TorchStrategy):
    """Ends in the second step's first update."""

    _asked = 0

    def update(self, update: Any) -> Any:
        """One update, or the end."""
        self._asked += 1
        if self._asked == 3:
            _end("trainer")
        return super().update(update)


class MortalSampler(HfBackend):
    """Ends at a request of the third turn."""

    async def generate(self, request: Any) -> Any:
        """One response, or the end."""
        if request.order[0] == 0 and request.order[-1] == 2:
            _end("sampler")
        return await super().generate(request)


class MortalLake(FrozenLake):
    """Ends at a second step, if no driver plays it."""

    _moves = 0

    def step(self, action: str) -> Any:
        """One step, or the end."""
        self._moves += 1
        if self._moves == 2 and ray.is_initialized() and ray.get_runtime_context().get_actor_id():
            _end("environment")
        return super().step(action)


@hookimpl
def train_strategies() -> list[Implementation]:
    """`mortal_torch`."""
    return [Implementation("mortal_torch", MortalTrainer, TorchConfig, summary="torch, and dies")]


@hookimpl
def inference_backends() -> list[Implementation]:
    """`mortal_hf`."""
    return [Implementation("mortal_hf", MortalSampler, HfConfig, summary="hf, and dies")]


@hookimpl
def environments() -> list[Implementation]:
    """`mortal_lake`."""
    return [Implementation("mortal_lake", MortalLake, summary="FrozenLake, and dies")]
