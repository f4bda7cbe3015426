"""What plays episodes in one process, the driver's or a worker's: on its event loop, environments in their hosts.
Public: a runtime's workers run it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from turnwise.contracts.chat import Chat
from turnwise.contracts.env_manager import Episode
from turnwise.contracts.inference import InferenceBackend, Request
from turnwise.contracts.rollout import EpisodeSpec, Frame, Played, RolloutSettings, TagPlan
from turnwise.data.numbers import LARGEST_REWARD
from turnwise.data.trajectory import Trajectory
from turnwise.errors import EngineError, EnvironmentFailure, PluginError, TurnwiseError, boundary, one_line
from turnwise.rollout.episode import EpisodeSampler, HostedEnvironment, Pool, Requests
from turnwise.rollout.gate import Gate
from turnwise.rollout.origin import raised
from turnwise.rollout.standing import Standing
from turnwise.rollout.sweeper import Sweeper

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How long cancelled episodes, and then the backend's aborts, may take; what still hangs is left behind."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalExecutor:
    """Episodes on this event loop; environments in their hosts. `chat` is None for a backend of `input: messages`.

    `sharing`: how many executors, this one included, start processes for their environments on this machine: each has
    its share of the cores for that.
    """

    workers = 1

    def __init__(
        self,
        plans: Iterable[TagPlan],
        settings: RolloutSettings,
        backend: InferenceBackend,
        chat: Chat | None,
        sharing: int = 1,
    ) -> None:
        self.settings, self.backend, self.chat = settings, backend, chat
        self._sweeper = Sweeper(min(settings.step_timeout, settings.reset_timeout, settings.request_timeout))
        # Of their own: no time passes for a request while the engine is paused, and it does for an environment.
        self._requests = Sweeper(settings.request_timeout)
        self.gate = Gate()
        starts = asyncio.Semaphore(max(1, cores() // sharing))
        self._pools = {plan.tag: Pool(plan, settings, self._sweeper, starts) for plan in plans}
        self._playing = 0
        self.standing = Standing()
        self._given_up: list[tuple[InferenceBackend, Request]] = []
        self._players: dict[str, dict[str, InferenceBackend]] = {}

    async def play(self, spec: EpisodeSpec, stop: Callable[[TurnwiseError], None]) -> Played:
        """As Executor.play."""
        self._playing += 1
        self.standing.at(spec, "its environment")
        cancelled = False
        try:
            return await self._play(spec, stop)
        except asyncio.CancelledError:  # with its batch: `abort` follows, for all at once
            cancelled = True
            raise
        finally:
            if self._given_up and not cancelled:
                await self.abort()
            self._playing -= 1
            self.standing.left(spec)
            if not self._playing:
                self._sweeper.stop()
                self._requests.stop()

    async def _play(self, spec: EpisodeSpec, stop: Callable[[TurnwiseError], None]) -> Played:
        pool = self._pools[spec.tag]
        plan = pool.plan
        frames: list[Frame] | None = [] if spec.rendered else None
        host = await pool.take(partial(self.standing.at, spec))
        sampler = self._sampler(self.backend, spec, stop)
        try:
            episode = Episode(
                environment=HostedEnvironment(
                    host, pool, spec.seed, spec.options, frames, partial(self.standing.at, spec), spec.record
                ),
                chat=self.chat,
                limits=plan.limits,
                tag=spec.tag,
                group=spec.group,
                member=spec.member,
                attempt=spec.attempt,
                seed=spec.seed,
                samplers={name: self._sampler(player, spec, stop) for name, player in self._players_of(plan).items()},
            )
            trajectories = _several(await plan.manager.run(episode, sampler), spec.tag)
            for trajectory in trajectories:
                # The manager's own penalty, or a sum of rewards of which each is fine.
                if not abs(trajectory.score) <= LARGEST_REWARD:
                    raise EnvironmentFailure(
                        f"{spec.tag}: the score of the episode is {trajectory.score}. Fix: rewards and penalties of"
                        " finite sum, within float32's range."
                    )
            samples = [
                [] if self.settings.evaluation else plan.manager.samples(trajectory) for trajectory in trajectories
            ]
        except asyncio.CancelledError:
            if not host.lost:  # it was the model that the episode waited for
                pool.give(host)
            raise
        except (KeyboardInterrupt, GeneratorExit):  # this process, or its event loop, is ending
            host.abandon()
            raise
        except BaseException as error:
            self.standing.at(spec, "its environment's close")
            await host.discard(self.settings.step_timeout)
            if isinstance(error, EnvironmentFailure):
                error.sampled_tokens = sampler.tokens
            if isinstance(error, TurnwiseError):
                raise
            if isinstance(error, Exception):
                failure = EnvironmentFailure(f"the environment manager {raised(error)}")
                failure.sampled_tokens = sampler.tokens
                raise failure from error
            # asyncio lets SystemExit through to whoever runs the loop: a run would end without a word, a worker by its
            # death.
            place = f"{spec.tag}, group {spec.group}, member {spec.member}"
            raise TurnwiseError(
                f"{place}: the episode ended by {one_line(error)}. Fix: an environment manager that returns or raises."
            ) from error
        pool.give(host)
        return Played(trajectories, samples, frames)

    def _sampler(
        self, backend: InferenceBackend, spec: EpisodeSpec, stop: Callable[[TurnwiseError], None]
    ) -> EpisodeSampler:
        gate = self.gate if backend is self.backend else Gate()  # a further model gets no weights
        note = partial(self.standing.at, spec)
        requests = Requests(backend, self.settings, self._requests, stop, self._given_up, note, gate)
        return EpisodeSampler(requests, spec.tag, spec.seed, spec.group, spec.member, spec.attempt, spec.record)

    def _players_of(self, plan: TagPlan) -> Mapping[str, InferenceBackend]:
        """The further models of a tag, built for its first episode."""
        if plan.tag not in self._players:
            self._players[plan.tag] = {name: build() for name, build in plan.samplers.items()}
        return self._players[plan.tag]

    def moved(self) -> int:
        """As Executor.moved."""
        return self.standing.moved

    def waits(self) -> list[str]:
        """As Executor.waits."""
        return self.standing.lines()

    def listen(self, changed: Callable[[], None]) -> None:
        """As Executor.listen."""
        self.gate.changed = changed

    async def hold(self) -> None:
        """As Executor.hold."""
        self.gate.close()

    def flying(self) -> int:
        """As Executor.flying."""
        return self.gate.flying

    async def freeze(self) -> None:
        """As Executor.freeze."""
        self._requests.frozen = True

    async def release(self) -> None:
        """As Executor.release."""
        self._requests.frozen = False
        self.gate.open()

    async def records(self) -> None:
        """Nothing: episodes write on the records themselves."""

    def stranded(self) -> bool:
        """Never: without its engine a backend of this process fails."""
        return False

    async def abort(self) -> None:
        """Abort at the backend what was given up, within the grace; an error in it is logged, for nobody can act on
        it."""
        # In place: the samplers of episodes hold this very list.
        given_up, self._given_up[:] = list(self._given_up), []
        aborts = [asyncio.ensure_future(_aborted(backend, request)) for backend, request in given_up]
        if aborts:
            done, late = await asyncio.wait(aborts, timeout=GRACE_SECONDS)
            for abort in late:
                abort.cancel()
            for error in filter(None, (abort.exception() for abort in done)):
                logger.warning("aborting a request raised %s", one_line(error))
        self._sweeper.stop()
        self._requests.stop()

    async def close(self) -> None:
        """Close the idle environments, those in play were cancelled before, and the further models."""
        for pool in self._pools.values():
            await pool.close()
        # Emptied first, so that a second `close` closes nothing twice.
        players, self._players = [player for of_tag in self._players.values() for player in of_tag.values()], {}
        for player in players:
            await player.close()
        self._sweeper.stop()
        self._requests.stop()


def _several(played: Trajectory | list[Trajectory], tag: str) -> list[Trajectory]:
    """What `run` returned as a list. Raises PluginError for none at all, and for two of one role, whose group would
    hold an episode twice."""
    trajectories = [played] if isinstance(played, Trajectory) else played
    if (
        not isinstance(trajectories, list)
        or not trajectories
        or not all(isinstance(one, Trajectory) for one in trajectories)
    ):
        raise PluginError(
            f"the environment manager of {tag} returned {played!r:.80}. Fix: a Trajectory, or a list of them."
        )
    roles = [trajectory.role for trajectory in trajectories]
    if len(set(roles)) < len(roles):
        raise PluginError(
            f"the environment manager of {tag} returned trajectories of the roles {roles}. Fix: a role of its own for"
            " each."
        )
    return trajectories


async def _aborted(backend: InferenceBackend, request: Request) -> None:
    with boundary("actor_infer: abort", EngineError):
        await backend.abort(request)
