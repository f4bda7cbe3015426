"""One sampling engine in a process of its own: an asynchronous actor around an inference backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from attrs import evolve

from turnwise.contracts.inference import Request
from turnwise.contracts.runtime import ServePlan
from turnwise.data.trajectory import Generation
from turnwise.plugins import registry
from turnwise_ray.actors import Answer, Home, Process, unpacked


class Replica(Process):
    """Builds the backend by name and serves it. A request is known by the ticket of whoever sent it.

    Where the engine behind the backend has ended (EngineLost, whichever method raised it), `end` does: whoever watches
    ends this process.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lost, self._cause = asyncio.Event(), ""
        self._requests: dict[str, Request] = {}
        # The serial number of the last `live` that was taken; all are above −1.
        self._latest = -1

    async def start(self, home: Home, plan: bytes, devices: tuple[int, ...]) -> Answer:
        """Build the backend; answers (input, readers of an offer by transport, node)."""

        async def work() -> Any:
            home.enter()
            built: ServePlan = unpacked(plan)
            context = evolve(built.context, devices=devices)
            self._backend = registry().build("inference_backend", built.implementation, built.config, context)
            # Asked here, where the devices are: the driver may have none.
            known = type(self._backend).transports(built.config, context)
            return self._backend.input, {name: self._backend.receivers(name) for name in known}, self.node()[0]

        return await self._answer(work())

    async def generate(self, ticket: str, request: Request, live: tuple[int, int] | None) -> Answer:
        """Sample one response. `live`: as in the method of that name, for calls may overtake each other."""
        return await self._answer(self._generate(ticket, request, live))

    async def _generate(self, ticket: str, request: Request, live: tuple[int, int] | None) -> Generation:
        if live is not None:
            self._take_live(live)
        # Before the first await: an abort must find the request, however soon it comes.
        self._requests[ticket] = request
        try:
            generation: Generation = await self._backend.generate(request)
            return generation
        finally:
            del self._requests[ticket]

    async def live(self, live: tuple[int, int]) -> None:
        """(serial number, episodes): an older one than the last is ignored."""
        self._take_live(live)

    def _take_live(self, live: tuple[int, int]) -> None:
        serial, episodes = live
        # Calls overtake each other: the latest number counts, not the one that arrives last.
        if serial > self._latest:
            self._latest = serial
            self._backend.live(episodes)

    async def abort(self, ticket: str) -> Answer:
        """Drop a request."""

        async def work() -> None:
            # It may have ended while the call was on its way.
            if ticket in self._requests:
                await self._backend.abort(self._requests[ticket])

        return await self._answer(work())

    async def do(self, method: str, *args: Any) -> Answer:
        """receive, pause, resume, sleep, wake or close."""

        async def work() -> Any:
            return await getattr(self._backend, method)(*args)

        return await self._answer(work())

    async def end(self) -> str:
        """Why the engine behind the backend has ended, once it has; else it never answers, and who waits learns of the
        end of this process."""
        await self._lost.wait()
        return self._cause

    async def _answer(self, work: Awaitable[Any]) -> Answer:
        answer = await self.answer_later(work)
        if answer.failure is not None and answer.lost and not self._lost.is_set():
            self._cause = answer.failure.text
            self._lost.set()
        return answer
