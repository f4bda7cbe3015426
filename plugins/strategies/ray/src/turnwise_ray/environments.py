"""The environment workers of a run, as the driver sees them: started, watched, and replaced when they die."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from typing import Any

import ray
from attrs import define, field

from turnwise.contracts.rollout import WorkerLost
from turnwise.errors import EnvironmentFailure, MachineError, TurnwiseError
from turnwise_ray.actors import WATCH_SECONDS, Home, death, process, result
from turnwise_ray.cluster import Cluster
from turnwise_ray.env_worker import EnvWorker

log = logging.getLogger("turnwise")


@define(eq=False)
class Worker:
    """One worker as the driver sees it. `open`: the stages that it knows."""

    number: int
    actor: Any = None
    load: int = 0
    moved: int = 0
    restarts: int = 0
    open: set[int] = field(factory=set)
    starting: asyncio.Lock = field(factory=asyncio.Lock)
    gone: bool = False

    @property
    def name(self) -> str:
        """As the log and errors name it."""
        return f"env_worker.{self.number}"


class Workers:
    """The environment workers of a run; one that dies is replaced, at most `max_restarts` times. One that answers
    nothing is killed."""

    def __init__(self, cluster: Cluster, home: Home, config: Any, timeout: float) -> None:
        self.cluster, self.home, self.config, self.timeout = cluster, home, config, timeout
        self.all = [Worker(number) for number in range(config.env_workers)]
        self.serials = itertools.count()
        self._members: tuple[Mapping[int, Any], str | None] = ({}, None)
        self._cause = ""
        self._silent: set[Any] = set()
        self._watches: set[asyncio.Task[None]] = set()

    def serve(self, members: Mapping[int, Any], failed: str | None) -> None:
        """Notify every worker which engines serve."""
        self._members = (members, failed)
        for worker in self.all:
            if worker.actor is not None:
                worker.actor.serve.remote(members, failed)

    def least(self) -> Worker:
        """The worker that plays the fewest episodes. Raises TurnwiseError when none is left."""
        alive = [worker for worker in self.all if not worker.gone]
        if not alive:
            raise TurnwiseError(
                f"all environment workers died more than max_restarts: {self.config.max_restarts} times. Last cause:"
                f" {self._cause} Fix: repair the environment, or step: process, or raise max_restarts of runtime ray"
            )
        return min(alive, key=lambda worker: (worker.load, worker.number))

    async def ready(self, worker: Worker, number: int, executor: bytes) -> Any:
        """The actor of a worker, started if need be, with the executor opened in it. Raises WorkerLost where it is not
        started again."""
        async with worker.starting:
            if worker.gone:  # since this episode chose it
                raise WorkerLost(
                    f"{worker.name} died more than max_restarts: {self.config.max_restarts} times", counts=False
                )
            if worker.actor is None:
                await self._start(worker)
            # A worker that was started again has forgotten the executors that it had.
            if number not in worker.open:
                await self._open(worker, number, executor)
            return worker.actor

    async def _start(self, worker: Worker) -> None:
        where = worker.name
        actor = process(EnvWorker, where, self.cluster.spread(), many=True)
        # Before the wait: a worker that dies while it starts has to be found by `died`.
        worker.actor, worker.open = actor, set()
        try:
            await result(actor.node.remote(), self.config.start_timeout)
        except TimeoutError as error:
            raise MachineError(
                f"{where} did not come up within start_timeout = {self.config.start_timeout:g} s. Fix: raise"
                " start_timeout"
            ) from error
        self.cluster.follow(actor, where)
        watch = asyncio.get_running_loop().create_task(self._watch(worker, actor))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _open(self, worker: Worker, number: int, executor: bytes) -> None:
        where = worker.name
        try:
            opened = await result(worker.actor.open.remote(number, self.home, executor, *self._members), self.timeout)
        except TimeoutError as error:
            raise MachineError(
                f"{where}: the environment managers were not built within runtime_timeout = {self.timeout:g} s. Fix:"
                " raise runtime_timeout"
            ) from error
        opened.unwrap(where, EnvironmentFailure)
        worker.open.add(number)

    async def _watch(self, worker: Worker, actor: Any) -> None:
        """End a worker that answers nothing: whoever waits for it learns that it died."""
        while True:
            # Any call answers while the worker's event loop runs: an environment that blocks it answers none.
            call = asyncio.ensure_future(result(actor.moved.remote()))
            # The second half counts where this process was stopped, too.
            for _ in range(2):
                await asyncio.wait([call], timeout=self.config.env_worker_timeout / 2)
            if not call.done():
                call.cancel()
                self._silent.add(actor)
                ray.kill(actor)
                return
            if call.exception() is not None:  # it died
                return
            worker.moved = call.result()
            await asyncio.sleep(WATCH_SECONDS)

    def died(self, worker: Worker, actor: Any, error: BaseException) -> WorkerLost:
        """The error for one episode of a lost worker; the first that reports the loss counts, and has it replaced."""
        seconds = f"env_worker_timeout = {self.config.env_worker_timeout:g} s"
        cause = (
            f"it answered nothing for {seconds} (a step that does not return?)."
            if actor in self._silent
            else death(error)
        )
        # All episodes of a worker report its death, and another may be in its place when the later ones do.
        first = worker.actor is actor
        if first:
            worker.actor, self._cause = None, cause
            worker.restarts += 1
            worker.gone = worker.restarts > self.config.max_restarts
            after = (
                "is not started again"
                if worker.gone
                else f"is started again ({worker.restarts} of max_restarts: {self.config.max_restarts})"
            )
            log.warning("%s died: %s It %s", worker.name, cause, after)
        return WorkerLost(f"{worker.name} died: {cause}", counts=first)

    async def close(self) -> None:
        """End all workers."""
        for watch in self._watches:
            watch.cancel()
        for worker in self.all:
            if worker.actor is not None:
                ray.kill(worker.actor)
                worker.actor = None
