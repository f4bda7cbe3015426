"""Requests over several engines, each an actor that may die."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Mapping
from typing import Any, Literal

import ray

from turnwise.contracts.inference import Request
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError, EngineLost
from turnwise_ray.actors import Answer, result
from turnwise_serving.affinity import Affinity


class Router:
    """Sends requests to the engines that serve (number → actor), in the driver or in a worker.

    A request whose engine dies is sent to another with the same seed. While none serves, requests wait: whoever waits
    for them has a timeout.
    """

    input: Literal["ids", "messages"]

    def __init__(self, role: str, input: Literal["ids", "messages"]) -> None:
        self.role = role
        self.input = input
        self._serving: dict[int, Any] = {}
        self._changed = asyncio.Event()
        self._homes = Affinity()
        # Tickets of several routers (the driver's, each worker's) meet in one engine, so each has a name of its own.
        self._name, self._serial = uuid.uuid4().hex, itertools.count()
        self._sent: dict[Request, tuple[Any, str]] = {}
        self._failed: EngineError | None = None
        self._live: tuple[int, int] | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is under way, and none that was given up still waits for its `abort`."""
        return not self._sent and not self._homes.waiting

    def serve(self, members: Mapping[int, Any], failed: str | None = None) -> None:
        """From now on these serve. `failed`: why nothing ever will again."""
        self._serving = dict(members)
        self._failed = EngineError(failed) if failed else None
        # Whoever waits for this one goes on and looks; later ones wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    async def generate(self, request: Request) -> Generation:
        """Sample one response. Raises EngineError."""
        try:
            while True:
                await self._any()
                with self._homes.of(request, self._serving) as number:
                    answer = await self._ask(number, request)
                if answer is not None:
                    break
        except asyncio.CancelledError:
            # `abort` may follow, and needs the ticket.
            raise
        except BaseException:
            self._sent.pop(request, None)
            raise
        self._sent.pop(request, None)
        generation: Generation = answer.unwrap(f"{self.role}.{number}", EngineError)
        return generation

    async def _ask(self, number: int, request: Request) -> Answer | None:
        """The engine's answer; None where it is gone, and has to be asked no more."""
        member, ticket = self._serving[number], f"{self._name}-{next(self._serial)}"
        # By a ticket, as the request's own identity is lost when it is pickled.
        self._sent[request] = (member, ticket)
        try:
            answer: Answer | None = await result(member.generate.remote(ticket, request, self._live))
        except ray.exceptions.RayActorError:
            answer = None
        # Its entry in `_sent` stays: the request is still under way (`idle`), and the next engine's replaces it.
        if answer is None or answer.lost:
            self._gone(number, member)
            return None
        return answer

    async def abort(self, request: Request) -> None:
        """Drop a request whose `generate` was cancelled."""
        if sent := self._sent.pop(request, None):
            member, ticket = sent
            try:
                (await result(member.abort.remote(ticket))).unwrap(self.role, EngineError)
            except (ray.exceptions.RayActorError, EngineLost):
                # Gone with its engine.
                return

    def _gone(self, number: int, member: Any) -> None:
        # By identity: the number may belong to a new engine already, which still serves.
        if self._serving.get(number) is member:
            self.serve({other: one for other, one in self._serving.items() if other != number})

    async def _any(self) -> None:
        """Wait until an engine serves. Raises EngineError where none ever will."""
        while not self._serving:
            if self._failed is not None:
                raise self._failed
            await self._changed.wait()
