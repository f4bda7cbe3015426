"""The sampling role in the driver: its engines are placed, given weights, watched, and replaced when they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from attrs import evolve

from turnwise.contracts.inference import BackendCapabilities, DeviceMemory, Request
from turnwise.contracts.runtime import ServePlan
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation
from turnwise.declared import declared
from turnwise.errors import EngineError, EngineLost, MachineError, TurnwiseError, one_line
from turnwise_ray.actors import Actor, Home, death, packed, process, result
from turnwise_ray.cluster import Cluster
from turnwise_ray.config import RayConfig
from turnwise_ray.members import Member, parts
from turnwise_ray.relay import TRANSPORT, relayed
from turnwise_ray.replica import Replica
from turnwise_ray.router import Router
from turnwise_ray.trainer import CLOSE_SECONDS, RayRole

log = logging.getLogger("turnwise")


class RayBackend(Router):
    """The engines of a role behind one inference backend (turnwise.contracts.inference). None serves before its first
    weights.

    An engine whose process dies, or which reports that it has ended (EngineLost), is built again, at most
    `max_restarts` times. If the trainer still has the weights of the last offer it gives them to the new engine at
    once; else the engine waits for the next weight update.
    """

    def __init__(
        self,
        plan: ServePlan,
        cluster: Cluster,
        home: Home,
        timeout: float,
        config: RayConfig,
        trainer: Callable[[], RayRole | None],
    ) -> None:
        super().__init__(plan.role, "ids")
        self._plan, self._cluster, self._home = plan, cluster, home
        self._timeout, self._config, self._trainer = timeout, config, trainer
        self._members: list[Member] = []
        # Who was counted for the offer that is under way (see `receivers`).
        self._reading: list[Member] | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[Mapping[int, Actor], str | None], None]] = []
        self._live_serial = 0
        # Held while weights are read, whoever began it: the pipeline's update, or an engine that is replaced.
        self._receiving = asyncio.Lock()
        self._synced = self._asleep = self._closed = False
        self.stranded = False
        """Whether none serves before the next weights: the engines that had the last are gone, and the trainer's are others."""

    async def start(self) -> RayBackend:
        """Place and build all engines. Raises what one raised, or MachineError."""
        idle = declared(BackendCapabilities, self._plan.implementation, self._plan.config).attached
        seats = await self._cluster.seats(self.role, self._plan.devices, idle=idle)
        self._members = [Member(number, part) for number, part in enumerate(parts(self._plan, seats))]
        try:
            await asyncio.gather(*(self._build(member) for member in self._members))
        except BaseException:
            await self.close()
            raise
        for member in self._members:
            self._watch(member)
        if not self._weights:  # a player has no weights to wait for
            self._synced = True
            self._join(self._members)
        return self

    async def _build(self, member: Member) -> None:
        if len({seat.node for seat in member.seats}) > 1:
            raise MachineError(
                f"{self.role}.{member.number}: its {len(member.seats)} devices lie on several nodes. Fix: engines that"
                " fit into one node"
            )
        where = f"{self.role}.{member.number}"
        actor = process(Replica, where, self._cluster.options(member.seats, self._plan.environment), many=True)
        self._cluster.follow(actor, where)
        # The process sees its own GPUs alone, so it numbers them from 0.
        devices = tuple(range(sum(bool(seat.gpu) for seat in member.seats)))
        try:
            await result(actor.node.remote(), self._config.start_timeout)
            # The environment was set before Python began there (see Cluster.options) and is no part of what is built.
            built = await result(
                actor.start.remote(self._home, packed(evolve(self._plan, environment={})), devices), self._timeout
            )
            self.input, member.readers, member.node = built.unwrap(where, EngineError)
        except BaseException as error:
            ray.kill(actor)
            if isinstance(error, TimeoutError):
                raise EngineError(f"{where} did not come up in time (start_timeout, runtime_timeout)") from error
            if isinstance(error, ray.exceptions.RayError):
                raise EngineError(f"{where} died while it was built. {death(error)}") from error
            raise
        member.actor = actor

    @property
    def _weights(self) -> bool:
        """Whether weights will come: a player takes them by no transport."""
        return any(member.readers for member in self._members)

    # ---------------------------------------------------------------- what the pipeline asks of a backend

    async def generate(self, request: Request) -> Generation:
        """Sample one response. Raises EngineError; before the first weights, too."""
        if not self._synced:
            raise EngineError(f"{self.role} was asked for a response before its first weights")
        return await super().generate(request)

    def live(self, episodes: int) -> None:
        """Passed on to a single engine; of several none can know how many will come to it, so each starts what it has
        (0)."""
        self._live_serial += 1
        self._live = (self._live_serial, episodes if len(self._members) == 1 else 0)
        for member in self._present():
            member.actor.live.remote(self._live)

    def receivers(self, transport: str) -> int:
        """How many readers the next offer has: the engines, of which those on another node share a relay where the
        transport ends at its node."""
        # Remembered until `receive`: the sender waits for just these readers, and one that joins now is not among them.
        self._reading = self._present()
        return self._readers(self._reading, transport)

    def _readers(self, members: Sequence[Member], transport: str) -> int:
        near, far = self._by_node(members, transport)
        return sum(member.readers[transport] for member in near) + len(far)

    async def receive(self, offer: Offer) -> int:
        """Give the weights to all engines and return the version that all of them serve. Raises EngineError."""
        members = self._present() if self._reading is None else self._reading
        self._reading = None
        gone = [member for member in members if member not in self._present()]
        if gone or not members:
            which = ", ".join(f"{self.role}.{member.number}" for member in gone or self._members)
            raise EngineError(f"{which} died before the weights of version {offer.version} came")
        await self._deliver(offer, members)
        self._synced = True
        self._join(members)
        return offer.version

    async def pause(self) -> None:
        """Pause all engines, those too that come up meanwhile. Where none is left, wait for one that is being built:
        somebody has to read the weights that follow."""
        # By actor and not by member: one that was replaced meanwhile has not been paused.
        paused: set[Actor] = set()
        while True:
            missing = [member for member in self._present() if member.actor not in paused]
            if missing:
                paused |= {member.actor for member in missing}
                await self._each("pause", missing)
            elif self._present():
                return
            elif self._failed is not None:
                raise self._failed
            else:
                await self._changed.wait()

    async def resume(self) -> None:
        """Resume all engines."""
        await self._each("resume")

    async def sleep(self) -> None:
        """Send all engines to sleep; one that is replaced meanwhile sleeps, too."""
        self._asleep = True
        await self._each("sleep")

    async def wake(self, what: DeviceMemory) -> None:
        """Wake that part of all engines."""
        self._asleep = False
        await self._each("wake", None, what)

    async def close(self) -> None:
        """Close and end all engines; may be called twice."""
        if self._closed:
            return
        self._closed = True
        for task in self._watchers:
            task.cancel()
        self.serve({}, f"{self.role} was closed")
        with contextlib.suppress(TurnwiseError, TimeoutError):  # they are ended below
            await asyncio.wait_for(self._each("close"), CLOSE_SECONDS)
        for member in self._members:
            if member.actor is not None:
                ray.kill(member.actor)
                member.actor = None

    # ---------------------------------------------------------------- engines

    def listen(self, changed: Callable[[Mapping[int, Actor], str | None], None]) -> None:
        """`changed(members, failed)` now and whenever others serve (for workers that send requests themselves)."""
        self._listeners.append(changed)
        changed(self._serving, None)

    def serve(self, members: Mapping[int, Actor], failed: str | None = None) -> None:
        """As in Router; whoever listens is notified."""
        self.stranded = self.stranded and not members
        super().serve(members, failed)
        for changed in self._listeners:
            changed(self._serving, failed)

    def _present(self) -> list[Member]:
        return [member for member in self._members if member.actor is not None and not member.lost]

    def _join(self, members: Sequence[Member]) -> None:
        self.serve(self._serving | {member.number: member.actor for member in members if member in self._present()})

    async def _do(self, member: Member, method: str, *args: Any) -> Any:
        where = f"{self.role}.{member.number}"
        call = member.actor.do.remote(method, *args)
        try:
            answer = await result(call, self._timeout)
        except asyncio.CancelledError:  # nobody waits for it any more
            ray.cancel(call)
            raise
        except TimeoutError as error:
            raise EngineError(f"{where}: {method} did not end within runtime_timeout = {self._timeout:g} s") from error
        except ray.exceptions.RayActorError as error:
            raise EngineLost(f"{where} died in {method}. {death(error)}") from error
        except ray.exceptions.RayError as error:  # an answer that could not be sent
            raise EngineError(f"{where}: {method} gave no answer. {death(error)}") from error
        return answer.unwrap(where, EngineError)

    async def _each(self, method: str, members: Sequence[Member] | None = None, *args: Any) -> None:
        """Call a method of all engines that are there, or of `members`; one that died counts no more, and is its
        watcher's business."""
        # Noted now: by the time of the answers another actor may be in its place.
        asked = [(member, member.actor) for member in (self._present() if members is None else members)]
        done = await asyncio.gather(*(self._do(member, method, *args) for member, _ in asked), return_exceptions=True)
        for (member, actor), error in zip(asked, done, strict=True):
            if isinstance(error, EngineLost):
                if member.actor is actor:  # else its watcher was faster, and another is in its place
                    self._leave(member)
            elif isinstance(error, BaseException):
                raise error

    def _by_node(self, members: Sequence[Member], transport: str) -> tuple[list[Member], dict[str, list[Member]]]:
        """The engines that read the trainer's offer themselves, and by node the others, which need a relay."""
        trainer = self._trainer() if transport == TRANSPORT else None
        far: dict[str, list[Member]] = {}
        for member in members:
            if trainer is not None and member.node != trainer.node:
                far.setdefault(member.node, []).append(member)
        return [member for member in members if trainer is None or member.node == trainer.node], far

    async def _deliver(self, offer: Offer, members: Sequence[Member]) -> None:
        near, far = self._by_node(members, offer.transport)
        # One update at a time: an engine that is given weights again must not overlap the next offer.
        async with self._receiving:
            works = [
                *(self._receive(member, offer) for member in near),
                *(self._relay(node, there, offer) for node, there in far.items()),
            ]
            tasks = [asyncio.ensure_future(work) for work in works]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                # The lock is released when none reads any more: the next offer must not meet a reader of this one.
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, member: Member, offer: Offer) -> None:
        version = await self._do(member, "receive", offer)
        if version != offer.version:
            raise EngineError(
                f"{self.role}.{member.number} serves version {version} after the weight update to {offer.version}"
            )

    async def _relay(self, node: str, members: Sequence[Member], offer: Offer) -> None:
        """Read the offer on the trainer's node and serve it on `node`."""
        trainer = self._trainer()
        assert trainer is not None
        await relayed(
            offer,
            self._cluster.on_node(trainer.node),
            self._cluster.on_node(node),
            sum(member.readers[offer.transport] for member in members),
            lambda there: [self._receive(member, there) for member in members],
            self.role,
            self._plan.context.weight_sync_timeout,
        )

    # ---------------------------------------------------------------- death

    def _watch(self, member: Member) -> None:
        task = asyncio.get_running_loop().create_task(self._watched(member))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _watched(self, member: Member) -> None:
        """Wait for the end of an engine, and put another in its place until it may not be replaced any more."""
        where = f"{self.role}.{member.number}"
        while True:
            cause = await self._end(member)
            while member.actor is None:
                # Over the whole run, not in a row: an engine that dies at every update would go on for ever.
                if member.restarts >= self._config.max_restarts:
                    self._lost(member, cause)
                    return
                member.restarts += 1
                log.warning(
                    "%s died: %s It is built again (%d of max_restarts: %d)",
                    where,
                    cause,
                    member.restarts,
                    self._config.max_restarts,
                )
                try:
                    await self._replace(member)
                except Exception as error:  # counted as one more death
                    cause = f"{type(error).__name__}: {error}"
                    if member.actor is not None:
                        ray.kill(member.actor)
                        member.actor = None
            self.serve(self._serving)  # whoever waits for an engine looks again

    async def _end(self, member: Member) -> str:
        """Wait until an engine has ended, end its process, too, and return the cause."""
        actor = member.actor
        try:
            cause: str = await result(actor.end.remote())
        except ray.exceptions.RayError as error:
            self._leave(member)
            member.actor = None
            return death(error)
        self._leave(member)
        member.actor = None
        try:  # what else belongs to the engine gives back its memory
            (await result(actor.do.remote("close"), CLOSE_SECONDS)).log_records(f"{self.role}.{member.number}")
        except (TimeoutError, ray.exceptions.RayError) as error:
            log.warning("%s.%d: close ended with %s", self.role, member.number, one_line(error))
        finally:
            ray.kill(actor)
        return cause if cause.endswith(".") else f"{cause}."

    def _leave(self, member: Member) -> None:
        member.lost = True
        self.serve({number: actor for number, actor in self._serving.items() if number != member.number})

    async def _replace(self, member: Member) -> None:
        member.seats = await self._cluster.again(self.role, member.seats)
        await self._build(member)
        trainer = self._trainer()
        # Without weights to come it serves at once; asleep it waits for the next update, as the others do.
        if not self._weights or self._asleep:
            if self._asleep:
                await self._do(member, "sleep")
            member.lost = False
            self._join([member] if not self._weights else [])
            return
        await self._do(member, "pause")  # an engine is up then, before an offer waits for it
        member.lost = False
        if not self._synced or trainer is None:
            return
        if await trainer.again(
            lambda transport: self._readers([member], transport), lambda offer: self._deliver(offer, [member])
        ):
            await self._do(member, "resume")
            log.warning("%s.%d has the current weights again", self.role, member.number)
            self._join([member])
        elif not self._serving:
            log.warning("%s.%d waits for the next weights, and every request for it", self.role, member.number)
            self.stranded = True  # who listens learns of it from the watcher

    def _lost(self, member: Member, cause: str) -> None:
        text = (
            f"{self.role}.{member.number} died more than max_restarts: {self._config.max_restarts} times. Last cause:"
            f" {cause}"
        )
        self._members.remove(member)
        if self._members:
            log.error("%s The other engines go on", text)
        else:
            self.serve({}, f"{text} Fix: look at its output above, or raise max_restarts of runtime ray")
