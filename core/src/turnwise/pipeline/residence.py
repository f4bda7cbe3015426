"""Roles that share devices take turns there: who is needed comes on, who is not goes off. Roles with devices of their own stay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from turnwise.config.schema import RunConfig
from turnwise.contracts.inference import InferenceBackend
from turnwise.pipeline import assembly

SAMPLER = "actor_infer"


class OwnReference:
    """The handle of a reference that is the actor with its adapters off."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def call(self, method: str, *args: Any) -> Any:
        """`logprobs` alone."""
        assert method == "logprobs"
        return await self._actor.call("base_logprobs", *args)


class Residence:
    """`handles`: the placed training roles by name (None: not placed); `backend`: the sampling one. With `one_model` the sampler reads the
    trainer's own weights, and there is nothing of its own to move.

    A role that shares no device (or has none: the CPU's memory is not short) is never moved.
    """

    def __init__(self, config: RunConfig, handles: Mapping[str, Any], backend: InferenceBackend, *, one_model: bool = False) -> None:
        self._handles = {name: handle for name, handle in handles.items() if handle is not None and not isinstance(handle, OwnReference)}
        self._backend = backend
        devices = {name: set(assembly.role_of(config, name).device_mapping) for name in (*self._handles, SAMPLER)}
        if one_model:
            devices[SAMPLER] = set()
        self._shares = {name: any(own & other for also, other in devices.items() if also != name) for name, own in devices.items()}
        self._asleep = False

    async def clear(self) -> None:
        """Send every training role that shares a device off it: the state between two uses."""
        for name, handle in self._handles.items():
            if self._shares[name]:
                await handle.call("offload")

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[None]:
        """The training role `name` is on its devices meanwhile."""
        moves = self._shares.get(name, False)
        if moves:
            await self._handles[name].call("onload")
        yield
        if moves:  # not after a failure: the run ends, and the role may not answer any more
            await self._handles[name].call("offload")

    async def sleep(self) -> None:
        """The sampler gives its devices back until `wake`."""
        if self._shares[SAMPLER] and not self._asleep:
            await self._backend.sleep()
            self._asleep = True

    async def wake(self) -> None:
        """The sampler is back, with room for the weights that follow."""
        if self._asleep:
            await self._backend.wake()
            self._asleep = False
