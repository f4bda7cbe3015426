"""Where the episodes of a step come from: they are played, played and written down, or read as they were written."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from turnwise.config.schema import RunConfig
from turnwise.contracts.rollout import RolloutResult
from turnwise.errors import CheckpointError
from turnwise.rollout import Scheduler, mock


class RolloutSource(Protocol):
    """The source of a run's training episodes. The loop asks for one step after the other; what is played ahead of it
    is the source's affair."""

    async def next(self, step: int, version: int) -> RolloutResult:
        """The episodes of pipeline step `step`, while the backend serves the weights of `version`. Raises EngineError,
        EnvironmentFailure past `max_env_failure_rate`, ConfigError for rollouts that cannot be read or written."""
        ...

    async def settled(self, version: int) -> None:
        """Wait until the weights of `version` may take the place of those that serve; `release` follows when they
        have."""
        ...

    async def hold(self) -> None:
        """Let nothing of the training play until `release`: an evaluation has the backend for itself."""
        ...

    async def release(self) -> None:
        """Undo `hold` and `settled`."""
        ...

    def state(self, first: int) -> dict[str, Any]:  # Any: data of the source's own, as turnwise.data.exact writes it
        """What a checkpoint after `first` steps must hold of what was played and not yet trained."""
        ...

    def restore(self, state: dict[str, Any]) -> None:  # Any: as `state`
        """Take up a state of `state`. Raises CheckpointError for one that this source cannot go on with."""
        ...

    def worked(self) -> float:
        """Seconds in which episodes were played, or read, since this was last asked."""
        ...

    def gauges(self) -> dict[str, float]:
        """Metrics of what is played ahead; {} where nothing is."""
        ...

    async def close(self) -> None:
        """End what still plays; may be called twice."""
        ...


class Live:
    """Episodes are played by the scheduler, up to `async_generation_ratio` steps ahead of the weights.

    `next` alone admits what is played. Where weights come between batches, `settled` waits until that is finished, and
    nothing plays from there to `next`; else episodes are open there, and held."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def next(self, step: int, version: int) -> RolloutResult:
        """Play the step."""
        return await self._scheduler.next_batch(step, version=version)

    async def settled(self, version: int) -> None:
        """As Scheduler.settled."""
        await self._scheduler.settled(version)

    async def hold(self) -> None:
        """Where episodes are open now, let them send nothing more, and wait for what was sent."""
        await self._scheduler.hold()

    async def release(self) -> None:
        """Let them go on."""
        await self._scheduler.release()

    def state(self, first: int) -> dict[str, Any]:  # Any: as RolloutSource.state
        """The scheduler's."""
        return self._scheduler.state(first)

    def restore(self, state: dict[str, Any]) -> None:  # Any: as RolloutSource.state
        """The scheduler's."""
        self._scheduler.load_state(state)

    def worked(self) -> float:
        """Of the scheduler."""
        return self._scheduler.worked()

    def gauges(self) -> dict[str, float]:
        """Of the scheduler."""
        return self._scheduler.gauges()

    async def close(self) -> None:
        """Close the scheduler."""
        await self._scheduler.close()


class Dumping(Live):
    """`rollout_mock: {mode: dump}`: what is played is written down, too."""

    def __init__(self, scheduler: Scheduler, config: RunConfig) -> None:
        super().__init__(scheduler)
        self._config = config

    async def next(self, step: int, version: int) -> RolloutResult:
        """Play the step and write it."""
        played = await super().next(step, version)
        await asyncio.to_thread(mock.write, self._config, step, played)
        return played


class Dumped:
    """`rollout_mock: {mode: mock}`: nothing is played, every step is read from its file."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._read = config, 0.0

    async def next(self, step: int, version: int) -> RolloutResult:
        """Read the step, whatever version played it."""
        began = time.perf_counter()
        try:
            return await asyncio.to_thread(mock.read, self._config, step)
        finally:
            self._read += time.perf_counter() - began

    async def settled(self, version: int) -> None:
        """At once."""

    async def hold(self) -> None:
        """Nothing plays."""

    async def release(self) -> None:
        """Nothing was held."""

    def state(self, first: int) -> dict[str, Any]:  # Any: as RolloutSource.state
        """An empty queue, as a scheduler between two steps has it, so that a run may go on by playing."""
        return {"queue": []}

    def restore(self, state: dict[str, Any]) -> None:  # Any: as RolloutSource.state
        """Raises CheckpointError where groups wait that were played: the files hold others."""
        if state.get("queue") != []:
            raise CheckpointError(
                "the checkpoint holds groups that were played and not trained, and rollout_mock reads others. Fix:"
                " resume without rollout_mock."
            )

    def worked(self) -> float:
        """Of reading."""
        read, self._read = self._read, 0.0
        return read

    def gauges(self) -> dict[str, float]:
        """Nothing is played."""
        return {}

    async def close(self) -> None:
        """There is nothing to close."""
