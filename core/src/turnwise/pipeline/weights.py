"""How weights go from the trainer to the backend: the two sides of one update."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from turnwise.config.schema import RunConfig
from turnwise.contracts.inference import InferenceBackend
from turnwise.contracts.runtime import TrainRole
from turnwise.contracts.train import Offer
from turnwise.errors import EngineError, OutOfMemory, boundary
from turnwise.pipeline.colocation import SAMPLER
from turnwise.pipeline.roles import Roles

GRACE_SECONDS = 10.0
"""After the failure of one side: how long the other may take to notice it and end in good order; more than a role waits for its own ranks."""


class WeightSync:
    """From the actor to the backend, by the transport that was chosen when both were placed."""

    def __init__(self, config: RunConfig, roles: Roles) -> None:
        self._roles = roles
        self._started = False
        self._pausing, self._passing = config.runtime_timeout, config.actor_infer.weight_sync_timeout

    async def publish(self, version: int) -> None:
        """From now on the backend samples with `version`; one that gave up its devices is woken for it. Raises as
        `update`."""
        roles = self._roles
        if not self._started and roles.colocation.shares(SAMPLER):
            # An engine takes a share of the memory that is free when it starts: it starts alone.
            await roles.colocation.make_room(SAMPLER)
            await _paused(roles.backend, version, self._pausing)
            roles.colocation.started()
        self._started = True
        await roles.colocation.meet()
        # A trainer's end is an error of its role already.
        with boundary(f"actor_infer: the weight update to version {version}", EngineError):
            leave = roles.colocation.sampling
            await update(
                roles.actor,
                roles.backend,
                roles.transport,
                version,
                leave,
                pausing=self._pausing,
                passing=self._passing,
            )


async def update(
    trainer: TrainRole,
    backend: InferenceBackend,
    transport: str,
    version: int,
    leave: Callable[[], Awaitable[None]],
    *,
    pausing: float,
    passing: float,
) -> None:
    """Weights of `version` from the trainer to the backend, between two tokens; the version is verified. `leave`: the
    trainer makes room for what the backend samples with.

    Raises EngineError or TrainerError; also when the backend needs more than `pausing` seconds to pause, or the weights
    more than `passing`.
    """
    # Before an offer waits for its readers, and before they are counted: an engine that is not up starts here, one that
    # died is noticed.
    await _paused(backend, version, pausing)
    try:
        async with asyncio.timeout(passing):
            offer = await trainer.offer(transport, version, backend.receivers(transport))
            now = await deliver(trainer, backend, offer)
        # Outside the time limit: moving roles is no part of the weights' way, and has the runtime's own.
        await leave()
        async with asyncio.timeout(passing):
            await backend.resume()
    except Exception as error:
        with contextlib.suppress(Exception):  # the failure is reported; what was attached to goes on without us
            async with asyncio.timeout(GRACE_SECONDS):
                await backend.resume()
        if isinstance(error, TimeoutError):
            raise EngineError(
                f"the weight update to version {version} took over weight_sync_timeout = {passing:g} s"
            ) from error
        raise
    if now != version:
        raise EngineError(f"the backend serves version {now} after the weight update to {version}")


async def _paused(backend: InferenceBackend, version: int, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await backend.pause()
    except TimeoutError as error:
        raise EngineError(
            f"the backend did not pause for version {version} within runtime_timeout = {seconds:g} s"
        ) from error


async def deliver(trainer: TrainRole, backend: InferenceBackend, offer: Offer) -> int:
    """Let the trainer send `offer` and the backend receive it; returns the version that it serves. Raises what the
    first side to fail raised, but rather a trainer's OutOfMemory, of which a backend notices only that nothing more
    comes.

    The other is then given up: a trainer would wait for a backend that never comes as long as an update may take.
    """
    sent, received = asyncio.ensure_future(trainer.send(offer)), asyncio.ensure_future(_received(backend, offer))
    try:
        _, version = await asyncio.gather(sent, received)
        return version
    except Exception:
        await asyncio.wait([sent, received], timeout=GRACE_SECONDS)
        if sent.done() and not sent.cancelled() and isinstance(sent.exception(), OutOfMemory):
            sent.result()
        raise
    finally:
        sent.cancel()
        received.cancel()
        # A role knows of the call that was given up before it is asked to save.
        await asyncio.wait([sent, received], timeout=GRACE_SECONDS)


async def _received(backend: InferenceBackend, offer: Offer) -> int:
    """The version that the backend then serves. The boundary stands inside the task: what leaves a task reaches the
    event loop first."""
    with boundary("actor_infer: receive", EngineError):
        return await backend.receive(offer)
