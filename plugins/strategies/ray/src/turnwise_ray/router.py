"""Requests over several engines: a trajectory stays where its prefix is cached, a new one goes where least is waiting."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

import ray

from turnwise.contracts.inference import Request
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError
from turnwise_ray.actors import result

_REMEMBERED = 100_000
"""Trajectories whose engine is remembered; the oldest are forgotten."""


class Router:
    """Sends requests to the engines that serve (number → actor), in the driver or in a worker.

    A request whose engine dies is sent to another with the same seed. While none serves, requests wait: whoever waits for them has a timeout.
    """

    input: Literal["ids", "messages"]

    def __init__(self, role: str, input: Literal["ids", "messages"]) -> None:
        self.role = role
        self.input = input
        self._serving: dict[int, Any] = {}
        self._changed = asyncio.Event()
        self._loads: Counter[int] = Counter()
        self._homes: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._name, self._serial = uuid.uuid4().hex, itertools.count()
        self._sent: dict[Request, tuple[Any, str]] = {}
        self._failed: EngineError | None = None
        self._live: tuple[int, int] | None = None

    def serve(self, members: Mapping[int, Any], failed: str | None = None) -> None:
        """From now on these serve. `failed`: why nothing ever will again."""
        self._serving = dict(members)
        self._failed = EngineError(failed) if failed else None
        self._changed.set()
        self._changed = asyncio.Event()

    async def generate(self, request: Request) -> Generation:
        """Sample one response. Raises EngineError."""
        while True:
            number = await self._choose(request.order[:-1])
            member, ticket = self._serving[number], f"{self._name}-{next(self._serial)}"
            self._loads[number] += 1
            self._sent[request] = (member, ticket)
            try:
                answer = await result(member.generate.remote(ticket, request, self._live))
            except ray.exceptions.RayActorError:
                if self._serving.get(number) is member:
                    self.serve({other: one for other, one in self._serving.items() if other != number})
                continue
            except asyncio.CancelledError:
                raise  # `abort` may follow, and needs the ticket
            except BaseException:
                del self._sent[request]
                raise
            finally:
                self._loads[number] -= 1
            del self._sent[request]
            generation: Generation = answer.unwrap(f"{self.role}.{number}", EngineError)
            return generation

    async def abort(self, request: Request) -> None:
        """Drop a request whose `generate` was cancelled."""
        if sent := self._sent.pop(request, None):
            member, ticket = sent
            try:
                (await result(member.abort.remote(ticket))).unwrap(self.role, EngineError)
            except ray.exceptions.RayActorError:
                return  # gone with its engine

    async def _choose(self, trajectory: tuple[int, ...]) -> int:
        while not self._serving:
            if self._failed is not None:
                raise self._failed
            await self._changed.wait()
        home = self._homes.get(trajectory)
        if home not in self._serving:
            home = min(self._serving, key=lambda number: (self._loads[number], number))
        self._homes[trajectory] = home
        self._homes.move_to_end(trajectory)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return home
