"""A stage is where episodes are played: here on the driver's event loop, or wherever a runtime has workers for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from attrs import frozen

from turnwise.contracts.chat import Chat
from turnwise.contracts.env_manager import Episode
from turnwise.contracts.inference import InferenceBackend
from turnwise.data.trajectory import Sample, Trajectory
from turnwise.errors import EnvironmentFailure, TurnwiseError
from turnwise.rollout.episode import EpisodeSampler, HostedEnvironment, Pool, Requests
from turnwise.rollout.plan import RolloutSettings, TagPlan
from turnwise.rollout.process import one_line
from turnwise.rollout.sweeper import Sweeper

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How long cancelled episodes, and then the backend's aborts, may take; what still hangs is left behind."""


@frozen(eq=False)
class EpisodeSpec:
    """One attempt at one episode, as plain data: everything that its seeds follow from. `rendered`: its frames are wanted."""

    tag: str
    group: int
    member: int
    attempt: int
    seed: int
    options: dict[str, Any] | None = None
    rendered: bool = False


@frozen(eq=False)
class Played:
    """A finished episode: its trajectory, training samples (none in evaluation) and frames (None if they were not wanted)."""

    trajectory: Trajectory
    samples: list[Sample]
    frames: list[Any] | None


class WorkerLost(EnvironmentFailure):
    """The worker that played an episode is gone. `counts`: whether this is the one episode by which the loss is counted as a failure of an
    environment; the others that the worker played are retried without being counted."""

    def __init__(self, text: str, counts: bool = True) -> None:
        super().__init__(text)
        self.counts = counts


class Stage(Protocol):
    """Plays episodes, many at once."""

    workers: int
    """How many workers there are, each of which may hold `max_concurrent` episodes."""

    async def play(self, spec: EpisodeSpec, stop: Callable[[TurnwiseError], None]) -> Played:
        """Play one attempt to its end.

        Raises EnvironmentFailure where the environment failed (the episode may be tried again), any other TurnwiseError where the batch
        cannot go on. `stop` is called with an EngineError when the backend does not answer in time, while the attempt still hangs."""
        ...

    async def abort(self) -> None:
        """Every `play` was cancelled: drop the requests that they waited for, without waiting for what hangs."""
        ...

    async def close(self) -> None:
        """Close every environment; may be called twice."""
        ...


class LocalStage:
    """Episodes on this event loop; environments in their hosts. `chat` is None for a backend of `input: messages`."""

    workers = 1

    def __init__(self, plans: Iterable[TagPlan], settings: RolloutSettings, backend: InferenceBackend, chat: Chat | None) -> None:
        self.settings, self.backend, self.chat = settings, backend, chat
        self._sweeper = Sweeper(min(settings.step_timeout, settings.reset_timeout, settings.request_timeout))
        self._pools = {plan.tag: Pool(plan, settings, self._sweeper) for plan in plans}
        self._playing = 0
        self._given_up: list[Any] = []

    async def play(self, spec: EpisodeSpec, stop: Callable[[TurnwiseError], None]) -> Played:
        """As Stage.play; what the manager raises passes as it is."""
        self._playing += 1
        try:
            return await self._play(spec, stop)
        finally:
            self._playing -= 1
            if not self._playing:
                self._sweeper.stop()

    async def _play(self, spec: EpisodeSpec, stop: Callable[[TurnwiseError], None]) -> Played:
        pool = self._pools[spec.tag]
        plan = pool.plan
        frames: list[Any] | None = [] if spec.rendered else None
        host = await pool.take()
        try:
            episode = Episode(
                environment=HostedEnvironment(host, pool, spec.seed, spec.options, frames),
                chat=self.chat,
                limits=plan.limits,
                tag=spec.tag,
                group=spec.group,
                member=spec.member,
                attempt=spec.attempt,
                seed=spec.seed,
            )
            requests = Requests(self.backend, self.settings, self._sweeper, stop, self._given_up)
            sampler = EpisodeSampler(requests, spec.tag, spec.seed, spec.group, spec.member, spec.attempt)
            trajectory = await plan.manager.run(episode, sampler)
            samples = [] if self.settings.evaluation else plan.manager.samples(trajectory)
        except asyncio.CancelledError:
            if not host.lost:  # it was the model that the episode waited for
                pool.give(host)
            raise
        except Exception:
            await host.discard(self.settings.step_timeout)
            raise
        pool.give(host)
        return Played(trajectory, samples, frames)

    async def abort(self) -> None:
        """Abort at the backend what was given up, within the grace; an error in it is logged, for nobody can act on it."""
        given_up, self._given_up[:] = list(self._given_up), []
        aborts = [asyncio.ensure_future(self.backend.abort(request)) for request in given_up]
        if aborts:
            done, late = await asyncio.wait(aborts, timeout=GRACE_SECONDS)
            for abort in late:
                abort.cancel()
            for error in filter(None, (abort.exception() for abort in done)):
                logger.warning("aborting a request raised %s", one_line(error))
        self._sweeper.stop()

    async def close(self) -> None:
        """Close the idle environments; those in play were cancelled before."""
        for pool in self._pools.values():
            await pool.close()
        self._sweeper.stop()
