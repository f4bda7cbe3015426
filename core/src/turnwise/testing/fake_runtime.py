"""A runtime whose roles live in this process and count what they were asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from attrs import frozen

from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import InferenceBackend
from turnwise.contracts.rollout import RolloutSettings, TagPlan
from turnwise.contracts.runtime import (
    RuntimeCapabilities,
    RuntimeContext,
    ServePlan,
    StrategyRole,
    TrainPlan,
    TrainRole,
)
from turnwise.contracts.train import TrainStrategy
from turnwise.errors import TrainerError, boundary
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
        if method == "update" and self._update:
            await asyncio.sleep(self._update)
        with boundary(f"{self.role}: {method}", TrainerError):
            return work(self.strategy)


class FakeRuntime:
    """Every role in this thread, without a thread or a timeout of its own."""

    capabilities = RuntimeCapabilities(one_process=True)

    def __init__(self, config: FakeRuntimeConfig, context: RuntimeContext) -> None:
        self._config = config
        self._placed: list[TrainRole | InferenceBackend] = []

    async def train(self, plan: TrainPlan) -> TrainRole:
        """Build the strategy by name."""
        strategy = registry().build("train_strategy", plan.implementation, plan.config, plan.context)
        role = FakeRole(strategy, plan.role, self._config.update)
        self._placed.append(role)
        return role

    async def serve(self, plan: ServePlan) -> InferenceBackend:
        """Build the backend by name."""
        backend: InferenceBackend = registry().build(
            "inference_backend", plan.implementation, plan.config, plan.context
        )
        self._placed.append(backend)
        return backend

    def executor(
        self, plans: Sequence[TagPlan], settings: RolloutSettings, chat: Chat | None, backend: InferenceBackend
    ) -> None:
        """None: episodes are played on the event loop."""

    async def close(self) -> None:
        """Close every placed role."""
        for placed in self._placed:
            await placed.close()
        self._placed.clear()
