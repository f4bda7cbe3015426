"""One sampling engine in a process of its own: an asynchronous actor around an inference backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from attrs import evolve

from turnwise.contracts.inference import Request, receivers
from turnwise.contracts.runtime import RolePlan
from turnwise.data.trajectory import Generation
from turnwise.plugins import registry
from turnwise_ray.actors import Answer, Home, Process, unpacked


class Replica(Process):
    """Builds the backend by name and serves it. A request is known by the ticket of whoever sent it.

    Where the engine behind the backend has ended (EngineLost, whichever method told it), `end` does: whoever watches ends this process.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lost, self._cause = asyncio.Event(), ""
        self._requests: dict[str, Request] = {}
        self._told = -1

    async def start(self, home: Home, plan: bytes, devices: tuple[int, ...]) -> Answer:
        """Build the backend; answers (input, transports, readers of an offer by transport, node)."""

        async def work() -> Any:
            home.enter()
            built: RolePlan = unpacked(plan)
            context = evolve(built.context, devices=devices)
            self._backend = registry().build(built.kind, built.implementation, built.config, context)
            transports = tuple(self._backend.transports)
            return self._backend.input, transports, {name: receivers(self._backend, name) for name in transports}, self.node()[0]

        return await self._answer(work())

    async def generate(self, ticket: str, request: Request, live: tuple[int, int] | None) -> Answer:
        """Sample one response. `live`: as in the method of that name, for calls may overtake each other."""
        return await self._answer(self._generate(ticket, request, live))

    async def _generate(self, ticket: str, request: Request, live: tuple[int, int] | None) -> Generation:
        if live is not None:
            self._tell(live)
        self._requests[ticket] = request
        try:
            generation: Generation = await self._backend.generate(request)
            return generation
        finally:
            del self._requests[ticket]

    async def live(self, live: tuple[int, int]) -> None:
        """(serial number, episodes): an older one than the last is ignored."""
        self._tell(live)

    def _tell(self, live: tuple[int, int]) -> None:
        serial, episodes = live
        if serial > self._told:
            self._told = serial
            self._backend.live(episodes)

    async def abort(self, ticket: str) -> Answer:
        """Drop a request."""

        async def work() -> None:
            if ticket in self._requests:
                await self._backend.abort(self._requests[ticket])

        return await self._answer(work())

    async def do(self, method: str, *args: Any) -> Answer:
        """receive, pause, resume, sleep, wake or close."""

        async def work() -> Any:
            return await getattr(self._backend, method)(*args)

        return await self._answer(work())

    async def end(self) -> str:
        """Why the engine behind the backend has ended, once it has; else it never answers, and who waits learns of the end of this process."""
        await self._lost.wait()
        return self._cause

    async def _answer(self, work: Awaitable[Any]) -> Answer:
        answer = await self.answer_later(work)
        if answer.failure is not None and answer.lost and not self._lost.is_set():
            self._cause = answer.failure.text
            self._lost.set()
        return answer
