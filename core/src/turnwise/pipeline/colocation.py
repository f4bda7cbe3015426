"""Roles that share devices take turns there: who is needed comes on, who is not goes off. Roles with devices of their
own stay."""

from __future__ import annotations

from collections.abc import Mapping

from turnwise.config.schema import RunConfig
from turnwise.contracts.inference import DeviceMemory, InferenceBackend
from turnwise.contracts.runtime import TrainRole
from turnwise.errors import EngineError, boundary
from turnwise.planning import assembly

SAMPLER, ACTOR = "actor_infer", "actor_train"


class Colocation:
    """`roles`: the placed training roles by name, all on their devices; `backend`: the sampling one. With `one_model`
    the sampler reads the trainer's own weights: it has nothing of its own to move, and samples where the actor is.

    A role that shares no device (or has none: the CPU's memory is not short) is never moved. Others leave when somebody
    needs their place, not
    before: most need it again themselves.
    """

    def __init__(
        self, config: RunConfig, roles: Mapping[str, TrainRole], backend: InferenceBackend, *, one_model: bool = False
    ) -> None:
        self._roles, self._backend, self._one_model = dict(roles), backend, one_model
        self._devices = {name: set(numbers) for name, numbers in assembly.devices(config).items()}
        if one_model:
            # No devices, so it shares none, and is neither put to sleep nor woken.
            self._devices[SAMPLER] = set()
        self._away: set[str] = set()
        # Nothing before the engine starts.
        self._awake: set[DeviceMemory] = set()
        self._paused = False

    def shares(self, name: str) -> bool:
        """Whether another role is on one of its devices, so that it comes and goes."""
        return bool(self._beside(name))

    def _beside(self, name: str) -> list[str]:
        own = self._devices.get(name, set())
        return [other for other in (SAMPLER, *self._roles) if other != name and own & self._devices.get(other, set())]

    def add(self, name: str, role: TrainRole) -> None:
        """A training role was built, and is on its devices."""
        self._roles[name] = role

    def started(self) -> None:
        """The sampler's engine is up, with all that it samples with."""
        self._awake = {"weights", "cache"}

    async def make_room(self, name: str) -> None:
        """Everybody else leaves the devices of `name`."""
        for other in self._beside(name):
            await self._leave(other)

    async def bring(self, name: str) -> None:
        """From now on the training role `name` is on its devices, and alone there, until another is brought."""
        await self.make_room(name)
        if name in self._away:
            await self._roles[name].onload()
            self._away.discard(name)
        # After `onload`: the weights that it samples with are there again.
        if name == ACTOR and self._paused:
            self._paused = False
            await self._backend.resume()

    async def meet(self) -> None:
        """The actor is on its devices, and on the sampler's own there is room for the weights that follow: nothing
        else, its cache included."""
        await self.bring(ACTOR)
        for other in self._beside(SAMPLER):
            if other != ACTOR:
                await self._leave(other)
        await self._wake("weights")

    async def sampling(self) -> None:
        """The sampler is on its devices, whole and alone."""
        if self._one_model:
            await self.bring(ACTOR)
        await self.make_room(SAMPLER)
        await self._wake("weights")
        # Last: it takes what the trainers have left.
        await self._wake("cache")

    async def sleep(self) -> None:
        """The sampler gives its devices back until `meet` or `sampling`, if it shares them."""
        if self.shares(SAMPLER) and self._awake:
            with boundary("actor_infer: sleep", EngineError):
                await self._backend.sleep()
            self._awake.clear()

    async def _wake(self, what: DeviceMemory) -> None:
        if self.shares(SAMPLER) and what not in self._awake:
            with boundary("actor_infer: wake", EngineError):
                await self._backend.wake(what)
            self._awake.add(what)

    async def _leave(self, name: str) -> None:
        if name == SAMPLER:
            await self.sleep()
        elif name not in self._away:
            # Nobody may sample with weights that are not there.
            if name == ACTOR and self._one_model and not self._paused:
                await self._backend.pause()
                self._paused = True
            await self._roles[name].offload()
            self._away.add(name)
