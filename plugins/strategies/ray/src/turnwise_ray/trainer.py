"""A training role: one actor per device, called all at once; rows are dealt to them and their answers put together."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from attrs import evolve

from turnwise.contracts.runtime import TrainPlan
from turnwise.contracts.train import Offer, Ranks
from turnwise.data.dealing import deal, gather, merge_results
from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.errors import MachineError, TrainerError, TurnwiseError
from turnwise.plugins import registry
from turnwise.ports import free_port
from turnwise_ray.actors import WATCH_SECONDS, Actor, Answer, Home, Process, death, packed, process, result, unpacked
from turnwise_ray.cluster import Cluster, Seat

GRACE_SECONDS = 5.0
"""After the first failure of a rank: how long the others may take to report theirs, which may be the cause."""
CLOSE_SECONDS = 30.0


class TrainRank(Process):
    """One rank: it builds the strategy by name and calls it."""

    def meet(self) -> tuple[str, str, int]:
        """(node id, node address, a free port on it): where the ranks may meet."""
        node, address = self.node()
        return node, address, free_port("")

    def start(self, home: Home, plan: bytes, ranks: Ranks, devices: tuple[int, ...]) -> Answer:
        """Build the strategy; answers its data_parallel."""
        return self.answer(lambda: self._start(home, plan, ranks, devices))

    def _start(self, home: Home, plan: bytes, ranks: Ranks, devices: tuple[int, ...]) -> Any:
        host, _, port = ranks.address.rpartition(":")
        # What engines read that expect a launcher; what the user set stays.
        # Engines take LOCAL_RANK for the number of their GPU, of which each rank sees one.
        device = devices[0] if devices else ranks.local_rank
        launched = {
            "RANK": ranks.rank,
            "WORLD_SIZE": ranks.size,
            "LOCAL_RANK": device,
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
        }
        for name, value in launched.items():
            os.environ.setdefault(name, str(value))
        # Plugins are declared before the plan is unpacked, of whose classes it may be made.
        home.enter()
        built: TrainPlan = unpacked(plan)
        context = evolve(built.context, ranks=ranks, devices=devices)
        self._target = registry().build("train_strategy", built.implementation, built.config, context)
        return tuple(self._target.data_parallel) if ranks.size > 1 else (0, 1)

    def call(self, answers: bool, method: str, *args: object) -> Answer:
        """Call the strategy; without `answers` the result stays here, for another rank returns it."""

        def work() -> Any:
            value = getattr(self._target, method)(*args)
            return value if answers else None

        return self.answer(work)


class RayRole:
    """A placed training role (turnwise.contracts.runtime.TrainRole). Calls run one after the other."""

    def __init__(self, plan: TrainPlan, cluster: Cluster, home: Home, timeout: float, start_timeout: float) -> None:
        self.role = plan.role
        self.node = ""  # that of rank 0, which sends the weights
        self._plan, self._cluster, self._home = plan, cluster, home
        self._timeout, self._start_timeout = timeout, start_timeout
        self._ranks: list[Actor] = []
        self._places: list[str] = []
        self._data_parallel: list[tuple[int, int]] = []
        self._turn = asyncio.Lock()
        self._sent = asyncio.Event()  # no offer waits to be sent
        self._sent.set()
        # Transport and version of the last offer, as long as the weights are still those; None after an update.
        self._fresh: tuple[str, int] | None = None
        self._offloaded = self._closed = self._left_behind = False
        self._broken: TurnwiseError | None = None

    async def start(self) -> RayRole:
        """Place the ranks and build the strategy in each. Raises what a rank raised, or MachineError."""
        seats = await self._cluster.seats(self.role, self._plan.devices)
        plan = packed(evolve(self._plan, environment={}))
        try:
            await self._spawn(seats)
            meets = await self._met()
            self.node = meets[0][0]
            hosts = [node for node, _, _ in meets]
            # Engines on other nodes find the first rank there, too.
            alone = sum(bool(node["Alive"]) for node in ray.nodes()) == 1
            # Loopback where one node is all there is: nobody else has to reach it.
            address = f"{'127.0.0.1' if alone else meets[0][1]}:{meets[0][2]}"
            calls = [
                rank.start.remote(
                    self._home,
                    plan,
                    Ranks(number, len(seats), hosts[:number].count(hosts[number]), address),
                    (0,) if seat.gpu else (),
                )
                for number, (rank, seat) in enumerate(zip(self._ranks, seats, strict=True))
            ]
            self._data_parallel = await self._all(calls, "start")
        except BaseException:
            self._kill()
            raise
        return self

    async def _spawn(self, seats: Sequence[Seat]) -> None:
        for number, seat in enumerate(seats):
            name = self.role if len(seats) == 1 else f"{self.role}.{number}"
            options = self._cluster.options([seat], self._plan.environment)
            self._ranks.append(process(TrainRank, name, options))
            self._places.append(f"rank {number} of {len(seats)} on {seat.address}")
            self._cluster.follow(self._ranks[-1], f"{self.role}, {self._places[-1]}")

    async def _met(self) -> list[tuple[str, str, int]]:
        try:
            return list(
                await asyncio.gather(*(result(rank.meet.remote(), self._start_timeout) for rank in self._ranks))
            )
        except TimeoutError as error:
            raise MachineError(
                f"{self.role}: its processes did not come up within start_timeout = {self._start_timeout:g} s."
                " Fix: raise it, or see their output"
            ) from error
        except ray.exceptions.RayError as error:
            raise TrainerError(f"{self.role}: a process did not come up: {death(error)}") from error

    async def logprobs(self, rows: Rows) -> np.ndarray:
        """As TrainStrategy.logprobs, of rows dealt to the ranks."""
        async with self._calling("logprobs"):
            return await self._dealt("logprobs", rows)

    async def base_logprobs(self, rows: Rows) -> np.ndarray:
        """As TrainStrategy.base_logprobs, of rows dealt to the ranks."""
        async with self._calling("base_logprobs"):
            return await self._dealt("base_logprobs", rows)

    async def values(self, rows: Rows) -> np.ndarray:
        """As TrainStrategy.values, of rows dealt to the ranks."""
        async with self._calling("values"):
            return await self._dealt("values", rows)

    async def update(self, update: Update) -> UpdateResult:
        """As TrainStrategy.update, of rows dealt to the ranks."""
        async with self._calling("update"):
            self._fresh = None
            shares = self._shares(update.rows)
            results: list[UpdateResult] = await self._answers(
                "update", [evolve(update, rows=rows) for _, rows in shares]
            )
            return results[0] if len(results) == 1 else merge_results(results)

    async def offer(self, transport: str, version: int, receivers: int = 1) -> Offer:
        """As TrainStrategy.offer, of rank 0. Until it is sent, no engine gets weights `again`."""
        async with self._calling("offer"):
            self._sent.clear()
            self._fresh = (transport, version)
            return await self._offer(transport, version, receivers)

    async def send(self, offer: Offer) -> None:
        """As TrainStrategy.send."""
        async with self._calling("send"):
            try:
                await self._each("send", offer)
            finally:
                self._sent.set()

    async def save(self, folder: Path) -> None:
        """As TrainStrategy.save; each rank writes its own part."""
        await self.each("save", folder)

    async def load(self, folder: Path) -> None:
        """As TrainStrategy.load."""
        async with self._calling("load"):
            self._fresh = None
            await self._each("load", folder)

    async def export(self, folder: Path) -> None:
        """As TrainStrategy.export."""
        await self.each("export", folder)

    async def offload(self) -> None:
        """As TrainStrategy.offload."""
        async with self._calling("offload"):
            await self._each("offload")
            self._offloaded = True

    async def onload(self) -> None:
        """As TrainStrategy.onload."""
        async with self._calling("onload"):
            await self._each("onload")
            self._offloaded = False

    async def each(self, method: str, *args: object) -> Any:  # what the method returns: it is called by name
        """Call a method of the strategies by name, one in each rank, and return what rank 0 answered. Raises what a
        rank raised, with the rank's name, or TrainerError for one that died or did not answer."""
        async with self._calling(method):
            return await self._each(method, *args)

    @contextlib.asynccontextmanager
    async def _calling(self, method: str) -> AsyncIterator[None]:
        """Calls run one after the other, and none after `close` or the end of a rank."""
        if self._closed:
            raise TrainerError(f"{self.role}: {method} was called after close")
        async with self._turn:
            if self._broken is not None:
                raise self._broken
            yield

    async def watch(self) -> None:
        """Ask all ranks every WATCH_SECONDS whether they are there. Raises TrainerError for one that is gone, and so
        does every later call."""
        while True:
            for rank, place in zip(self._ranks, self._places, strict=True):
                try:
                    await result(rank.node.remote())
                except ray.exceptions.RayError as error:
                    self._broken = self._broken or TrainerError(
                        f"{self.role}, {place}: the process died. {death(error)}"
                    )
                    raise self._broken from error
            await asyncio.sleep(WATCH_SECONDS)

    async def again(self, receivers: Callable[[str], int], receive: Callable[[Offer], Awaitable[object]]) -> bool:
        """Send the weights of the last offer once more, to backends that came later. False: they have changed since,
        the next offer will do.
        `receivers`: how many read an offer of a transport.

        Raises TurnwiseError; the strategy itself goes on."""
        while True:
            await self._sent.wait()
            async with self._turn:
                if not self._sent.is_set():
                    continue
                if self._broken is not None:
                    raise self._broken
                if self._fresh is None or self._closed:
                    return False
                back = self._offloaded
                if back:
                    await self._each("onload")
                offer = await self._offer(*self._fresh, receivers(self._fresh[0]))
                done = await asyncio.gather(self._each("send", offer), receive(offer), return_exceptions=True)
                if back:
                    await self._each("offload")
                for error in done:
                    if isinstance(error, BaseException):
                        raise error
                return True

    async def _each(self, method: str, *args: object) -> Any:
        # A process elsewhere may have another working folder.
        args = tuple(arg.absolute() if isinstance(arg, Path) else arg for arg in args)
        answers = await self._all(
            [rank.call.remote(number == 0, method, *args) for number, rank in enumerate(self._ranks)], method
        )
        return answers[0]

    async def _offer(self, transport: str, version: int, receivers: int) -> Offer:
        offer: Offer = await self._each("offer", transport, version, receivers)
        return offer

    async def _dealt(self, method: str, rows: Rows) -> np.ndarray:
        """An answer along the rows, put together in their order."""
        shares = self._shares(rows)
        values: list[np.ndarray] = await self._answers(method, [piece for _, piece in shares])
        return values[0] if len(values) == 1 else gather(rows, [share for share, _ in shares], values)

    def _shares(self, rows: Rows) -> list[tuple[np.ndarray, Rows]]:
        """Which rows each data parallel rank gets, and those rows."""
        shares = deal(rows, self._data_parallel[0][1])
        return [(share, rows if len(shares) == 1 else rows.select(share)) for share in shares]

    async def _answers(self, method: str, pieces: Sequence[Rows | Update]) -> list[Any]:
        """Each data parallel rank gets its piece alone; those within one get the same, and the first of them
        answers."""
        # Once a piece: the ranks within a data parallel one get the same rows. In threads: pickling holds up the loop.
        stored = await asyncio.gather(*(asyncio.to_thread(ray.put, piece) for piece in pieces))
        # One rank of each data parallel part answers; tensor and pipeline parallel ranks would send the same again.
        first = {part: number for number, (part, _) in reversed(list(enumerate(self._data_parallel)))}
        calls = [
            rank.call.remote(first[part] == number, method, stored[part])
            for number, (rank, (part, _)) in enumerate(zip(self._ranks, self._data_parallel, strict=True))
        ]
        answers = await self._all(calls, method)
        return [answers[first[part]] for part in range(len(pieces))]

    async def _all(self, calls: Sequence[Any], method: str) -> list[Any]:
        """The answers of all ranks. After a failure the others have a little time to report theirs; a rank that then
        still waits for a lost one is ended."""
        loop = asyncio.get_running_loop()
        waiting = {asyncio.ensure_future(result(call)): number for number, call in enumerate(calls)}
        answers: dict[int, Any] = {}
        # With each, whether it is an error made for a reader: that one is preferred below.
        failures: list[tuple[bool, TurnwiseError]] = []
        end, dead = loop.time() + self._timeout, False
        try:
            while waiting and not dead:
                done, _ = await asyncio.wait(
                    waiting, timeout=max(0.0, end - loop.time()), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for future in sorted(done, key=waiting.__getitem__):
                    number = waiting.pop(future)
                    where = f"{self.role}, {self._places[number]}"
                    try:
                        answer: Answer = future.result()
                        answers[number] = answer.unwrap(where, TrainerError)
                    except ray.exceptions.RayTaskError as error:  # an answer that could not be sent
                        failures.append((False, TrainerError(f"{where}: {method} gave no answer. {death(error)}")))
                    except ray.exceptions.RayError as error:
                        dead = True
                        failures = [(True, TrainerError(f"{where}: the process died in {method}. {death(error)}"))]
                        break
                    except TurnwiseError as error:
                        failures.append((answer.failure is not None and answer.failure.foreseen, error))
                if failures:
                    end = min(end, loop.time() + GRACE_SECONDS)
        except asyncio.CancelledError:
            # The call goes on in the ranks, and `close` must not wait behind it.
            self._left_behind = True
            raise
        finally:
            for future in waiting:
                future.cancel()
        if not failures and not waiting:
            return [answers[number] for number in range(len(calls))]
        # Rather what a strategy reported itself than the exception of a rank that noticed another's end.
        problem = max(failures, key=lambda one: one[0])[1] if failures else self._late(method, sorted(waiting.values()))
        # A rank that still waits, or is gone, cannot take part in the next call either.
        if waiting or dead:
            self._broken = problem
            self._kill()
        raise problem

    def _late(self, method: str, numbers: Sequence[int]) -> TrainerError:
        who = "; ".join(self._places[number] for number in numbers)
        return TrainerError(
            f"{self.role}: {method} did not end within runtime_timeout = {self._timeout:g} s ({who}). Fix: raise"
            " runtime_timeout, or lower the batch."
        )

    def _kill(self) -> None:
        for rank in self._ranks:
            # The cluster is gone, and the process with it.
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(rank)

    async def close(self) -> None:
        """Close the strategy in every rank and end the processes; may be called twice. Ranks that hang or are lost are
        ended at once."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._broken is None and not self._left_behind:
                self._timeout = min(self._timeout, CLOSE_SECONDS)
                await self._each("close")
        finally:
            self._kill()
