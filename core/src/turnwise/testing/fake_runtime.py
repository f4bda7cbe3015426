"""A runtime whose roles live in this process and count what they were asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

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


class FakeRole(StrategyRole):
    """A training role in this thread."""

    def __init__(self, strategy: TrainStrategy, role: str = "actor_train") -> None:
        self.strategy = strategy
        self.role = role

    async def run(self, method: str, work: Callable[[TrainStrategy], T]) -> T:
        """Do it here and now."""
        with boundary(f"{self.role}: {method}", TrainerError):
            return work(self.strategy)


class FakeRuntime:
    """Every role in this thread, without a thread or a timeout of its own."""

    capabilities = RuntimeCapabilities(one_process=True)

    def __init__(self, config: None, context: RuntimeContext) -> None:
        self._placed: list[TrainRole | InferenceBackend] = []

    async def train(self, plan: TrainPlan) -> TrainRole:
        """Build the strategy by name."""
        role = FakeRole(registry().build("train_strategy", plan.implementation, plan.config, plan.context), plan.role)
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
