"""Episodes of a run on Ray: played in the environment workers, or in the driver."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import ray
from attrs import evolve

from turnwise.contracts.chat import Chat
from turnwise.contracts.rollout import (
    EnvironmentTimeout,
    EpisodeSpec,
    Played,
    ReplayDiffers,
    RolloutSettings,
    TagPlan,
)
from turnwise.errors import EnvironmentFailure, MachineError, TurnwiseError, one_line
from turnwise.rollout.standing import Standing
from turnwise.rollout.worker import LocalExecutor
from turnwise_ray.actors import Actor, Answer, death, packed, result
from turnwise_ray.backend import RayBackend
from turnwise_ray.env_worker import Added, Hold, Known
from turnwise_ray.environments import Worker, Workers

log = logging.getLogger("turnwise")

_CLOSE_SECONDS = 30.0
_MADE_THERE: Any = None
"""In place of a plan's manager, which every worker makes for itself."""


class HereExecutor(LocalExecutor):
    """Episodes in the driver, whose engines may lose their weights."""

    backend: RayBackend  # type: ignore[assignment]  # one backend of those that the class above takes

    def listen(self, changed: Callable[[], None]) -> None:
        """As Executor.listen."""
        super().listen(changed)
        self.backend.listen(lambda members, failed: changed() if self.backend.stranded else None)

    def stranded(self) -> bool:
        """As Executor.stranded."""
        return self.backend.stranded


class RayExecutor:
    """turnwise.contracts.rollout.Executor over the workers: training's, or evaluation's."""

    def __init__(
        self,
        workers: Workers,
        plans: Sequence[TagPlan],
        settings: RolloutSettings,
        chat: Chat | None,
        backend: RayBackend,
    ) -> None:
        self.workers = len(workers.all)
        self._pool, self._backend = workers, backend
        self._number = next(workers.serials)
        self._standing = Standing()
        self._tickets = itertools.count()
        # Episodes in play, and those that were cancelled until `abort`, which still asks for their records.
        self._plays: dict[int, tuple[EpisodeSpec, Worker]] = {}
        self._changed: Callable[[], None] = lambda: None
        self._hold = Hold()
        # By worker: the process that knows of a hold, and of which; and how many requests are on their way there.
        self._told: dict[Worker, tuple[Actor, int]] = {}
        self._flying: dict[Worker, int] = {}
        self._followers: set[asyncio.Task[None]] = set()
        # A manager holds environments and locks of this process: each worker makes its own from the plan's builder.
        shares = [
            evolve(plan, manager=_MADE_THERE, max_concurrent_steps=_share(plan.max_concurrent_steps, self.workers))
            for plan in plans
        ]
        # Packed once: the same bytes go to every worker, and to one that takes another's place.
        self._stage = packed((shares, settings, chat, backend.role, backend.input, self.workers))

    async def play(self, spec: EpisodeSpec, stop: Callable[[TurnwiseError], None]) -> Played:
        """As Executor.play. Raises WorkerLost where the worker died."""
        worker, ticket = self._pool.least(), next(self._tickets)
        worker.load += 1
        self._plays[ticket] = spec, worker
        self._standing.at(spec, worker.name)
        actor, given_up = None, False
        try:
            actor = await self._pool.ready(worker, self._number, self._stage)
            if self._told.get(worker, (actor, 0)) != (actor, self._hold.serial):  # it was started since
                await self._tell(worker, actor)
            answer: Answer = await result(actor.play.remote(self._number, ticket, spec))
        except asyncio.CancelledError:
            given_up = True
            raise
        except ray.exceptions.RayTaskError as error:
            raise TurnwiseError(f"{worker.name}: an episode could not be sent back. {death(error)}") from error
        except ray.exceptions.RayError as error:
            raise self._pool.died(worker, actor or worker.actor, error) from error
        finally:
            worker.load -= 1
            self._standing.left(spec)
            if not given_up:
                del self._plays[ticket]
                self._changed()
        if answer.failure is not None and answer.failure.kind in _ENVIRONMENT:
            answer.log_records(worker.name)
            failure = _ENVIRONMENT[answer.failure.kind](answer.failure.text)
            failure.sampled_tokens = answer.failure.sampled_tokens
            raise failure
        played: Played = answer.unwrap(worker.name, EnvironmentFailure)
        return played

    def moved(self) -> int:
        """As Executor.moved; what moves in a worker is asked every WATCH_SECONDS."""
        return self._standing.moved + sum(worker.moved for worker in self._pool.all)

    def waits(self) -> list[str]:
        """The worker of each episode."""
        return self._standing.lines()

    def listen(self, changed: Callable[[], None]) -> None:
        """As Executor.listen."""
        self._changed = changed
        self._backend.listen(lambda members, failed: changed() if self._backend.stranded else None)

    def stranded(self) -> bool:
        """As Executor.stranded."""
        return self._backend.stranded

    # ---------------------------------------------------------------- what the workers hold

    async def hold(self) -> None:
        """As Executor.hold. Raises MachineError for a worker that does not answer within runtime_timeout."""
        await self._set(evolve(self._hold, closed=True))

    async def freeze(self) -> None:
        """As Executor.freeze. Raises as `hold`."""
        await self._set(evolve(self._hold, frozen=True))

    async def release(self) -> None:
        """As Executor.release. Raises as `hold`."""
        await self._set(Hold(self._hold.serial))

    def flying(self) -> int:
        """As Executor.flying."""
        episodes = Counter(worker for _, worker in self._plays.values())
        return sum(self._flying.get(worker, count) for worker, count in episodes.items())

    async def _set(self, hold: Hold) -> None:
        self._hold = evolve(hold, serial=self._hold.serial + 1)
        self._flying.clear()
        told = await asyncio.gather(
            *(self._tell(worker, worker.actor) for worker in self._there()), return_exceptions=True
        )
        for error in told:
            # One that died holds nothing: its episodes learn of it, and begin again in a worker that does.
            if isinstance(error, BaseException) and not isinstance(error, ray.exceptions.RayError):
                raise error

    async def _tell(self, worker: Worker, actor: Actor) -> None:
        """Let a worker hold what is held now, and follow how many of its requests are on their way."""
        hold = self._hold
        try:
            flying = await result(actor.hold.remote(self._number, hold), self._pool.timeout)
        except TimeoutError as error:
            raise MachineError(
                f"{worker.name} did not hold its episodes within runtime_timeout = {self._pool.timeout:g} s. Fix: raise"
                " runtime_timeout"
            ) from error
        if self._hold is not hold:  # whatever came since is told on its own
            return
        self._told[worker] = actor, hold.serial
        if hold.closed:
            follower = asyncio.get_running_loop().create_task(self._follow(worker, actor, hold, flying))
            self._followers.add(follower)
            follower.add_done_callback(self._followers.discard)

    async def _follow(self, worker: Worker, actor: Actor, hold: Hold, flying: int) -> None:
        while self._hold is hold and worker.actor in (actor, None):
            self._flying[worker] = flying
            self._changed()
            if not flying:
                return
            try:
                flying = await result(actor.flying.remote(self._number, flying))
            except ray.exceptions.RayError:
                flying = 0

    # ---------------------------------------------------------------- records, and the end

    async def records(self) -> None:
        """As Executor.records; a worker that died, or does not answer, leaves those of its episodes as they are."""
        await self._recorded("records", self._pool.timeout)

    async def abort(self) -> None:
        """Cancel what the workers still play for this executor."""
        await self._recorded("abort", _CLOSE_SECONDS)
        self._plays.clear()

    async def close(self) -> None:
        """Close the environments of this executor in every worker; may be called twice."""
        for follower in self._followers:
            follower.cancel()
        there = self._there()
        await asyncio.gather(*(self._ask(worker, "close", _CLOSE_SECONDS) for worker in there))
        for worker in self._pool.all:
            worker.open.discard(self._number)

    async def _recorded(self, method: str, seconds: float) -> None:
        """Call this in every worker, with what is known of its episodes' records; they get what it answers."""
        known: dict[Worker, dict[int, tuple[int, int]]] = {worker: {} for worker in self._there()}
        for ticket, (spec, worker) in self._plays.items():
            if worker in known and spec.record is not None:
                known[worker][ticket] = len(spec.record.generations), len(spec.record.digests)
        await asyncio.gather(*(self._record(worker, method, seconds, there) for worker, there in known.items()))

    async def _record(self, worker: Worker, method: str, seconds: float, known: Known) -> None:
        added: Added = await self._ask(worker, method, seconds, known) or {}
        for ticket, (generations, digests) in added.items():
            record = self._plays[ticket][0].record if ticket in self._plays else None
            # Another answer may have brought the same.
            if record is not None and known[ticket] == (len(record.generations), len(record.digests)):
                record.generations.update(generations)
                record.digests.extend(digests)

    def _there(self) -> list[Worker]:
        """The workers that know this executor."""
        return [worker for worker in self._pool.all if worker.actor is not None and self._number in worker.open]

    async def _ask(self, worker: Worker, method: str, seconds: float, *args: Any) -> Any:
        """What a worker answers; None for what is given up, on which nobody can act."""
        call: Coroutine[Any, Any, Answer] = result(getattr(worker.actor, method).remote(self._number, *args), seconds)
        with contextlib.suppress(TurnwiseError):
            try:
                return (await call).unwrap(worker.name, EnvironmentFailure)
            except (TimeoutError, ray.exceptions.RayError) as error:
                log.warning("%s: %s ended with %s", worker.name, method, one_line(error))
        return None


_ENVIRONMENT = {kind.__name__: kind for kind in (EnvironmentFailure, EnvironmentTimeout, ReplayDiffers)}


def _share(number: int | None, workers: int) -> int | None:
    return None if number is None else -(-number // workers)
