"""The process of an environment worker: it runs manager and environment together and asks the engines itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import islice
from typing import Any

from attrs import define, evolve, field, frozen

from turnwise.contracts.rollout import EpisodeSpec, Played, Record
from turnwise.data.trajectory import Generation
from turnwise.errors import TurnwiseError
from turnwise.rollout.worker import GRACE_SECONDS, LocalExecutor
from turnwise_ray.actors import Answer, Home, Process, unpacked
from turnwise_ray.router import Router

Known = Mapping[int, tuple[int, int]]
"""By the ticket of an episode: of how many generations and digests of its record the driver knows."""
Added = Mapping[int, tuple[dict[int, Generation], list[str]]]
"""By the ticket of an episode: what its record holds beyond that."""


@frozen
class Hold:
    """What the workers of an executor hold back: new requests (`closed`), the time of requests (`frozen`). The one with
    the highest `serial` counts, for calls overtake each other."""

    serial: int = 0
    closed: bool = False
    frozen: bool = False


@define(eq=False)
class _Stage:
    """One executor in a worker: the tasks of its episodes, and their records by ticket. `changed`: another number of
    requests is on its way while they are held, or something else is held."""

    executor: LocalExecutor
    router: Router
    hold: Hold = field(factory=Hold)
    changed: asyncio.Event = field(factory=asyncio.Event)
    playing: set[asyncio.Task[Any]] = field(factory=set)
    records: dict[int, Record] = field(factory=dict)

    def added(self, known: Known) -> Added:
        """What the driver does not know yet, of the episodes that it asks for and that are still played."""
        return {
            ticket: (dict(islice(record.generations.items(), turns, None)), record.digests[digests:])
            for ticket, (turns, digests) in known.items()
            if (record := self.records.get(ticket)) is not None
        }


class EnvWorker(Process):
    """Plays episodes. An executor (training, evaluation) is known by its number; its environments live as long as
    it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._stages: dict[int, _Stage] = {}

    async def open(
        self, number: int, home: Home, executor: bytes, members: Mapping[int, Any], failed: str | None
    ) -> Answer:
        """Build managers and what else an executor needs, by name. `members`, `failed`: as in `serve`."""

        async def work() -> None:
            home.enter()
            plans, settings, chat, role, input, sharing = unpacked(executor)
            built = [evolve(plan, manager=plan.manager_builder()) for plan in plans]
            router = Router(role, input)
            router.serve(members, failed)
            local = LocalExecutor(built, settings, router, chat, sharing)  # type: ignore[arg-type]  # what an executor asks of a backend
            self._stages[number] = stage = _Stage(local, router)
            local.listen(stage.changed.set)

        return await self.answer_later(work())

    async def serve(self, members: Mapping[int, Any], failed: str | None) -> None:
        """Which engines serve now."""
        for stage in self._stages.values():
            stage.router.serve(members, failed)

    async def moved(self) -> int:
        """Calls that the episodes of all executors here have begun or ended."""
        return sum(stage.executor.moved() for stage in self._stages.values())

    async def play(self, number: int, ticket: int, spec: EpisodeSpec) -> Answer:
        """One attempt at one episode."""
        stage = self._stages[number]
        # For what the executor finds while the episode hangs: its task alone would never end.
        stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def stop(error: TurnwiseError) -> None:
            if not stopped.done():
                stopped.set_exception(error)

        task = asyncio.ensure_future(stage.executor.play(spec, stop))
        stage.playing.add(task)
        if spec.record is not None:
            stage.records[ticket] = spec.record
        try:
            return await self.answer_later(_first(task, stopped))
        finally:
            stage.playing.discard(task)
            stage.records.pop(ticket, None)

    async def hold(self, number: int, hold: Hold) -> int:
        """From now on hold this back; answers how many requests are on their way."""
        stage = self._stages[number]
        if hold.serial > stage.hold.serial:
            stage.hold = hold
            # Nobody runs between these: what was held before and is not any more is released first.
            await stage.executor.release()
            if hold.closed:
                await stage.executor.hold()
            if hold.frozen:
                await stage.executor.freeze()
            stage.changed.set()
        return stage.executor.flying()

    async def flying(self, number: int, seen: int) -> int:
        """How many requests are on their way, once these are not `seen` any more, or no longer held."""
        stage = self._stages[number]
        while stage.hold.closed and stage.executor.flying() == seen:
            stage.changed.clear()
            await stage.changed.wait()
        return stage.executor.flying()

    async def records(self, number: int, known: Known) -> Answer:
        """Added: what the records of these episodes hold by now."""

        async def work() -> Added:
            return self._stages[number].added(known)

        return await self.answer_later(work())

    async def abort(self, number: int, known: Known) -> Answer:
        """Cancel the episodes of an executor, and what they asked of the engines; answers as `records`."""

        async def work() -> Added:
            stage = self._stages[number]
            added, tasks = stage.added(known), list(stage.playing)
            for task in tasks:
                task.cancel()
            if tasks:  # a cancelled episode tells what it no longer waits for
                await asyncio.wait(tasks, timeout=GRACE_SECONDS)
            await stage.executor.abort()
            return added

        return await self.answer_later(work())

    async def close(self, number: int) -> Answer:
        """Close the environments of an executor."""
        return await self.answer_later(self._stages.pop(number).executor.close())


async def _first(task: asyncio.Task[Played], stopped: asyncio.Future[None]) -> Played:
    """The episode, or the error that stopped it while it hung."""
    both: set[asyncio.Future[Any]] = {task, stopped}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        task.cancel()
        stopped.result()
    stopped.cancel()
    return await task
