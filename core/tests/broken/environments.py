"""Environments that break their contract in one way each; test_testing_kit.py says which contract tests must notice."""

from __future__ import annotations

import math
import random
import time
from datetime import datetime
from time import time as now
from typing import Any, ClassVar

import numpy as np

from turnwise import Implementation, hookimpl
from turnwise.testing.fakes import (
    FakeEnvironment,
)

Reset = tuple[Any, dict[str, Any]]
Step = tuple[Any, float, bool, bool, dict[str, Any]]


class SeedsGlobally(FakeEnvironment):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        random.seed(seed)
        return super().reset(seed=seed, options=options)


class DrawsGlobally(FakeEnvironment):
    def step(self, action: str) -> Step:
        observation, _, *rest = super().step(action)
        return observation, float(np.random.random()), *rest  # type: ignore[return-value]


class SeedsWhenItIsBuilt(FakeEnvironment):
    def __init__(self) -> None:
        super().__init__()
        np.random.seed(0)


class DrawsGloballyNowAndThen(FakeEnvironment):
    def step(self, action: str) -> Step:
        if self._seed == 5:
            random.random()
        return super().step(action)


class SharesState(FakeEnvironment):
    steps: ClassVar[list[int]] = [0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        self.steps[0] = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Step:
        self.steps[0] += 1
        observation, _, *rest = super().step(action)
        return observation, float(self.steps[0]), *rest  # type: ignore[return-value]


class WritesIntoASharedTask(FakeEnvironment):
    """What is cached for a seed is made anew by reset, and worn by the steps of all who play it."""

    tasks: ClassVar[dict[int | None, list[int]]] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        self.task = self.tasks[seed] = self.tasks.get(seed, [])
        self.task.clear()
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Step:
        self.task.append(1)
        observation, _, *rest = super().step(action)
        return observation, float(len(self.task)), *rest  # type: ignore[return-value]


class RewardsHaste(FakeEnvironment):
    """As long as nobody is slow, nothing is seen of it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        self.began = time.monotonic()
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Step:
        observation, reward, *rest = super().step(action)
        return observation, reward if time.monotonic() < self.began + 600 else -1.0, *rest  # type: ignore[return-value]


class RewardsByTheDay(FakeEnvironment):
    def step(self, action: str) -> Step:
        observation, _, *rest = super().step(action)
        return observation, float(now() // 86400), *rest  # type: ignore[return-value]


class TellsTheDate(FakeEnvironment):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        _, info = super().reset(seed=seed, options=options)
        return f"{datetime.now():%Y-%m-%d}, task {seed}", info


class RejectsItsAnswer(FakeEnvironment):
    """Its verifier wants another form than that of its data."""

    def step(self, action: str) -> Step:
        *rest, info = super().step(action.replace("a", "A"))
        return *rest, info  # type: ignore[return-value]


class AnswersWithAList(FakeEnvironment):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | {"answer": ["a"]}


class IgnoresSeed(FakeEnvironment):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        return super().reset(seed=0, options=options)


class SeedsOf31Bits(FakeEnvironment):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        (seed or 0).to_bytes(4, signed=True)  # as a library in C does
        return super().reset(seed=seed, options=options)


class SeedsByHash(FakeEnvironment):
    """Another task in every process: `hash()` of a text is salted."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        return super().reset(seed=hash(str(seed)) % 2**32, options=options)


class OrdersBySet(FakeEnvironment):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        _, info = super().reset(seed=seed, options=options)
        return f"{seed}: " + " ".join({"apple", "pear", "plum", "cherry", "quince", "fig"}), info


class RemembersEpisodes(FakeEnvironment):
    episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        self.episodes += 1
        return f"episode {self.episodes} of seed {seed}", super().reset(seed=seed)[1]


class HoldsALambda(FakeEnvironment):
    def __init__(self) -> None:
        super().__init__()
        self.rule = lambda action: action


class RewardsNan(FakeEnvironment):
    def step(self, action: str) -> Step:
        observation, _, *rest = super().step(action)
        return observation, math.nan, *rest  # type: ignore[return-value]


class TellsLists(FakeEnvironment):
    def step(self, action: str) -> Step:
        *rest, info = super().step(action)
        return *rest, info | {"state_key": [1, 2]}  # type: ignore[return-value]


class ClosesOnce(FakeEnvironment):
    closed = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class RaisesOnEmpty(FakeEnvironment):
    def step(self, action: str) -> Step:
        if not action:
            raise ValueError("no action")
        return super().step(action)


class NeedsTheResponse(FakeEnvironment):
    def step(self, action: str, response: Any) -> Step:  # type: ignore[override]
        return super().step(response.text)


class RendersFloats(FakeEnvironment):
    def render(self) -> np.ndarray:
        return np.zeros((2, 2))


@hookimpl
def environments() -> list[Implementation]:
    made = [SeedsGlobally, DrawsGlobally, SharesState, IgnoresSeed, SeedsOf31Bits, RemembersEpisodes, HoldsALambda]
    made += [RewardsNan, TellsLists, ClosesOnce, RaisesOnEmpty, NeedsTheResponse, RendersFloats]
    made += [SeedsByHash, OrdersBySet, SeedsWhenItIsBuilt, DrawsGloballyNowAndThen, WritesIntoASharedTask]
    made += [RewardsHaste, RewardsByTheDay, TellsTheDate, RejectsItsAnswer, AnswersWithAList]
    return [Implementation(c.__name__, c) for c in made]
