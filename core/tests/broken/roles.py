"""Backends, strategies, runtimes and a model source that break their contract in one way each; test_testing_kit.py says
which contract tests must notice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from attrs import evolve

from turnwise import Implementation, hookimpl
from turnwise.contracts.chat import Message
from turnwise.contracts.inference import Request
from turnwise.contracts.train import Offer
from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.data.trajectory import Generation, int32
from turnwise.testing import fixtures
from turnwise.testing.fakes import (
    FakeBackend,
    FakeChat,
    FakeModelSource,
    FakeRole,
    FakeRuntime,
    FakeStrategy,
)


class IgnoresTheTemperature(FakeBackend):
    async def generate(self, request: Request) -> Generation:
        return await super().generate(evolve(request, args=evolve(request.args, temperature=1.0)))


class KeepsItsVersion(FakeBackend):
    async def receive(self, offer: Offer) -> int:
        await super().receive(offer)
        self._version = 0
        return offer.version


class CountsRequests(FakeBackend):
    async def generate(self, request: Request) -> Generation:
        return await super().generate(evolve(request, seed=request.seed + self.served))


class NeverPauses(FakeBackend):
    async def pause(self) -> None:
        pass


class StampsTheNewest(FakeBackend):
    async def generate(self, request: Request) -> Generation:
        answer = await super().generate(request)
        assert answer.ids is not None and answer.versions is not None
        # Weights come meanwhile, and what was sampled with the old ones is called theirs; of short answers nobody asks.
        until = time.monotonic() + (1.0 if request.max_new_tokens > 16 else 0.0)
        while self._version == answer.versions[-1] and time.monotonic() < until:
            await asyncio.sleep(0)
        return evolve(answer, versions=int32([self._version] * len(answer.ids)))


class ColdStrategy(FakeStrategy):
    def _scores(self, before: np.ndarray) -> np.ndarray:
        return super()._scores(before) * self._context.temperature


class AveragesMicroBatches(FakeStrategy):
    def update(self, update: Update) -> UpdateResult:
        return super().update(evolve(update, rows=_scaled(update.rows, self._context.per_device_train_batch_size)))


def _scaled(rows: Rows, by: int) -> Rows:
    return evolve(rows, columns={**rows.columns, "coef": rows.columns["coef"] * by})


class GoesUphill(FakeStrategy):
    def update(self, update: Update) -> UpdateResult:
        return super().update(evolve(update, lr=-update.lr))


class ForgetsTheWeights(FakeStrategy):
    def load(self, folder: Path) -> None:
        kept = self._weights.copy()
        super().load(folder)
        self._weights[:] = kept


class SilentRole(FakeRole):
    async def run(self, method: str, work: Any) -> Any:
        try:
            return await super().run(method, work)
        except Exception:
            return None


class SilentRuntime(FakeRuntime):
    async def train(self, plan: Any) -> Any:
        placed = await super().train(plan)
        return SilentRole(placed.strategy)


class UnwatchedRole(FakeRole):
    async def watch(self) -> None:
        return None


class UnwatchedRuntime(FakeRuntime):
    async def train(self, plan: Any) -> Any:
        placed = await super().train(plan)
        return UnwatchedRole(placed.strategy)


class PartialRole:
    def __init__(self, role: Any) -> None:
        self.logprobs, self.update = role.logprobs, role.update
        self.close, self.load, self.save, self.offer, self.send, self.watch = (
            role.close,
            role.load,
            role.save,
            role.offer,
            role.send,
            role.watch,
        )


class PartialRuntime(FakeRuntime):
    async def train(self, plan: Any) -> Any:
        return PartialRole(await super().train(plan))


class AbsentWorkers(FakeRuntime):
    def executor(self, plans: Any, settings: Any, chat: Any, backend: Any) -> Any:
        return SimpleNamespace(workers=0)


class OpenChat(FakeChat):
    def extend(
        self, ids: np.ndarray, finish: str, messages: Sequence[Message], images: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        return self.render(messages, images)


class OpenSource(FakeModelSource):
    def chat(self, folder: Path) -> FakeChat:
        return OpenChat()


@hookimpl
def inference_backends() -> list[Implementation]:
    made = (IgnoresTheTemperature, KeepsItsVersion, CountsRequests, NeverPauses, StampsTheNewest)
    return [
        Implementation(c.__name__, c, config="turnwise.testing.fakes:FakeBackendConfig", fixtures=fixtures.backend)
        for c in made
    ]


@hookimpl
def train_strategies() -> list[Implementation]:
    made = (ColdStrategy, AveragesMicroBatches, GoesUphill, ForgetsTheWeights)
    return [Implementation(c.__name__, c, fixtures=fixtures.strategy) for c in made]


@hookimpl
def runtimes() -> list[Implementation]:
    return [Implementation(c.__name__, c) for c in (SilentRuntime, UnwatchedRuntime, PartialRuntime, AbsentWorkers)]


@hookimpl
def model_sources() -> list[Implementation]:
    return [Implementation("OpenSource", OpenSource, fixtures=fixtures.source)]
