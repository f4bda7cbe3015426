"""Environments in processes of their own: a worker runs manager and environment together and asks the engines
itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from attrs import define, evolve, field

from turnwise.contracts.chat import Chat
from turnwise.contracts.rollout import EnvironmentTimeout, EpisodeSpec, Played, RolloutSettings, TagPlan, WorkerLost
from turnwise.errors import EnvironmentFailure, MachineError, TurnwiseError, one_line
from turnwise.rollout.origin import raised
from turnwise.rollout.standing import Standing
from turnwise.rollout.worker import LocalExecutor
from turnwise_ray.actors import WATCH_SECONDS, Answer, Home, Process, death, packed, process, result, unpacked
from turnwise_ray.backend import RayBackend
from turnwise_ray.cluster import Cluster
from turnwise_ray.router import Router

log = logging.getLogger("turnwise")

_CLOSE_SECONDS = 30.0
_MADE_THERE: Any = None
"""In place of a plan's manager, which every worker makes for itself."""


class EnvWorker(Process):
    """Plays episodes. An executor (training, evaluation) is known by its number; its environments live as long as
    it."""

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
            if not hasattr(self, "_executors"):
                self._executors: dict[int, tuple[LocalExecutor, Router]] = {}
                self._playing: dict[int, set[asyncio.Task[Any]]] = {}
            self._executors[number] = LocalExecutor(built, settings, router, chat, sharing), router  # type: ignore[arg-type]  # what an executor asks of a backend
            self._playing[number] = set()

        return await self.answer_later(work())

    async def serve(self, members: Mapping[int, Any], failed: str | None) -> None:
        """Which engines serve now."""
        for _, router in getattr(self, "_executors", {}).values():
            router.serve(members, failed)

    async def moved(self) -> int:
        """Calls that the episodes of all executors here have begun or ended."""
        return sum(executor.moved() for executor, _ in getattr(self, "_executors", {}).values())

    async def play(self, number: int, spec: EpisodeSpec) -> Answer:
        """One attempt at one episode."""
        executor, _ = self._executors[number]
        # For what the executor finds while the episode hangs: its task alone would never end.
        stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def stop(error: TurnwiseError) -> None:
            if not stopped.done():
                stopped.set_exception(error)

        task = asyncio.ensure_future(executor.play(spec, stop))
        self._playing[number].add(task)
        try:
            return await self.answer_later(_first(task, stopped))
        finally:
            self._playing[number].discard(task)

    async def abort(self, number: int) -> Answer:
        """Cancel the episodes of an executor, and what they asked of the engines."""

        async def work() -> None:
            for task in list(self._playing[number]):
                task.cancel()
            # One turn of the loop, in which the cancelled episodes tell the engines what they no longer wait for.
            await asyncio.sleep(0)
            await self._executors[number][0].abort()

        return await self.answer_later(work())

    async def close(self, number: int) -> Answer:
        """Close the environments of an executor."""
        return await self.answer_later(self._executors[number][0].close())


async def _first(task: asyncio.Task[Played], stopped: asyncio.Future[None]) -> Played:
    """The episode, or the error that stopped it while it hung; what the manager raises is a failure of the
    environment's side."""
    both: set[asyncio.Future[Any]] = {task, stopped}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        task.cancel()
        stopped.result()
    stopped.cancel()
    try:
        return await task
    except (TurnwiseError, asyncio.CancelledError):
        raise
    except Exception as error:
        raise EnvironmentFailure(f"the environment manager {raised(error)}") from error


@define(eq=False)
class _Worker:
    """One worker as the driver sees it. `open`: the stages that it knows."""

    number: int
    actor: Any = None
    load: int = 0
    moved: int = 0
    restarts: int = 0
    open: set[int] = field(factory=set)
    starting: asyncio.Lock = field(factory=asyncio.Lock)
    gone: bool = False


class Workers:
    """The environment workers of a run; one that dies is replaced, at most `max_restarts` times. One that answers
    nothing is killed."""

    def __init__(self, cluster: Cluster, home: Home, config: Any, timeout: float) -> None:
        self.cluster, self.home, self.config, self.timeout = cluster, home, config, timeout
        self.all = [_Worker(number) for number in range(config.env_workers)]
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

    def least(self) -> _Worker:
        """The worker that plays the fewest episodes. Raises TurnwiseError when none is left."""
        alive = [worker for worker in self.all if not worker.gone]
        if not alive:
            raise TurnwiseError(
                f"all environment workers died more than max_restarts: {self.config.max_restarts} times. Last cause:"
                f" {self._cause} Fix: repair the environment, or step: process, or raise max_restarts of runtime ray"
            )
        return min(alive, key=lambda worker: (worker.load, worker.number))

    async def ready(self, worker: _Worker, number: int, executor: bytes) -> Any:
        """The actor of a worker, started if need be, with the executor opened in it. Raises WorkerLost where it is not
        started again."""
        async with worker.starting:
            if worker.gone:  # since this episode chose it
                raise WorkerLost(
                    f"{_name(worker)} died more than max_restarts: {self.config.max_restarts} times", counts=False
                )
            if worker.actor is None:
                await self._start(worker)
            # A worker that was started again has forgotten the executors that it had.
            if number not in worker.open:
                await self._open(worker, number, executor)
            return worker.actor

    async def _start(self, worker: _Worker) -> None:
        where = _name(worker)
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

    async def _open(self, worker: _Worker, number: int, executor: bytes) -> None:
        where = _name(worker)
        try:
            opened = await result(worker.actor.open.remote(number, self.home, executor, *self._members), self.timeout)
        except TimeoutError as error:
            raise MachineError(
                f"{where}: the environment managers were not built within runtime_timeout = {self.timeout:g} s. Fix:"
                " raise runtime_timeout"
            ) from error
        opened.unwrap(where, EnvironmentFailure)
        worker.open.add(number)

    async def _watch(self, worker: _Worker, actor: Any) -> None:
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

    def died(self, worker: _Worker, actor: Any, error: BaseException) -> WorkerLost:
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
            log.warning("%s died: %s It %s", _name(worker), cause, after)
        return WorkerLost(f"{_name(worker)} died: {cause}", counts=first)

    async def close(self) -> None:
        """End all workers."""
        for watch in self._watches:
            watch.cancel()
        for worker in self.all:
            if worker.actor is not None:
                ray.kill(worker.actor)
                worker.actor = None


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
        self._pool = workers
        self._number = next(workers.serials)
        self._standing = Standing()
        # A manager holds environments and locks of this process: each worker makes its own from the plan's builder.
        shares = [
            evolve(plan, manager=_MADE_THERE, max_concurrent_steps=_share(plan.max_concurrent_steps, self.workers))
            for plan in plans
        ]
        # Packed once: the same bytes go to every worker, and to one that takes another's place.
        self._stage = packed((shares, settings, chat, backend.role, backend.input, self.workers))

    async def play(self, spec: EpisodeSpec, stop: Callable[[TurnwiseError], None]) -> Played:
        """As Executor.play. Raises WorkerLost where the worker died."""
        worker = self._pool.least()
        worker.load += 1
        self._standing.at(spec, _name(worker))
        actor = None
        try:
            actor = await self._pool.ready(worker, self._number, self._stage)
            answer: Answer = await result(actor.play.remote(self._number, spec))
        except ray.exceptions.RayTaskError as error:
            raise TurnwiseError(f"{_name(worker)}: an episode could not be sent back. {death(error)}") from error
        except ray.exceptions.RayError as error:
            raise self._pool.died(worker, actor or worker.actor, error) from error
        finally:
            worker.load -= 1
            self._standing.left(spec)
        if answer.failure is not None and answer.failure.kind in _ENVIRONMENT:
            answer.log_records(_name(worker))
            raise _ENVIRONMENT[answer.failure.kind](answer.failure.text)
        played: Played = answer.unwrap(_name(worker), EnvironmentFailure)
        return played

    def moved(self) -> int:
        """As Executor.moved; what moves in a worker is asked every WATCH_SECONDS."""
        return self._standing.moved + sum(worker.moved for worker in self._pool.all)

    def waits(self) -> list[str]:
        """The worker of each episode."""
        return self._standing.lines()

    async def abort(self) -> None:
        """Cancel what the workers still play for this executor."""
        await self._each("abort")

    async def close(self) -> None:
        """Close the environments of this executor in every worker; may be called twice."""
        await self._each("close")
        for worker in self._pool.all:
            worker.open.discard(self._number)

    async def _each(self, method: str) -> None:
        open = [worker for worker in self._pool.all if worker.actor is not None and self._number in worker.open]
        calls = [result(getattr(worker.actor, method).remote(self._number), _CLOSE_SECONDS) for worker in open]
        for worker, answer in zip(open, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            # It is given up; nobody can act on it.
            with contextlib.suppress(TurnwiseError):
                if isinstance(answer, Answer):
                    answer.unwrap(_name(worker), EnvironmentFailure)
                elif isinstance(answer, BaseException):
                    log.warning("%s: %s ended with %s", _name(worker), method, one_line(answer))


_ENVIRONMENT: dict[str, type[EnvironmentFailure]] = {
    "EnvironmentFailure": EnvironmentFailure,
    "EnvironmentTimeout": EnvironmentTimeout,
}


def _share(number: int | None, workers: int) -> int | None:
    return None if number is None else -(-number // workers)


def _name(worker: _Worker) -> str:
    return f"env_worker.{worker.number}"
