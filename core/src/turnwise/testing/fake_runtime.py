"""A runtime whose roles live in this process and count what they were asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from attrs import frozen

from turnwise.contracts.runtime import RuntimeContext, StrategyRole, TrainPlan, TrainRole
from turnwise.contracts.train import TrainStrategy
from turnwise.errors import TrainerError, boundary
from turnwise.pipeline.local import LocalRuntime
from turnwise.plugins import registry

T = TypeVar("T")


@frozen
class FakeRuntimeConfig:
    """`update`: seconds that every update of a training role takes, in which others play."""

    update: float = 0.0


class FakeRole(StrategyRole):
    """A training role in this thread. `update`: as in FakeRuntimeConfig."""

    def __init__(self, strategy: TrainStrategy, role: str = "actor_train", update: float = 0.0) -> None:
        self.strategy = strategy
        self.role = role
        self._update = update

    async def run(self, method: str, work: Callable[[TrainStrategy], T]) -> T:
        """Do it here and now, or at the end of the time that an update takes."""
        # First the time, then the work: until it is over, others find the weights as they were.
        if method == "update" and self._update:
            await asyncio.sleep(self._update)
        with boundary(f"{self.role}: {method}", TrainerError):
            return work(self.strategy)


class FakeRuntime(LocalRuntime):
    """The local runtime, but that training roles work in this thread, without a thread or a timeout of their own."""

    def __init__(self, config: FakeRuntimeConfig, context: RuntimeContext) -> None:
        super().__init__(None, context)
        self._config = config

    async def train(self, plan: TrainPlan) -> TrainRole:
        """Build the strategy by name."""
        strategy = registry().build("train_strategy", plan.implementation, plan.config, plan.context)
        role = FakeRole(strategy, plan.role, self._config.update)
        self._placed.append(role)
        return role
