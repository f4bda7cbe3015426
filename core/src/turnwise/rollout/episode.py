"""What one episode plays with: an environment of the tag's pool behind checks, and a sampler that speaks to the
backend."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from turnwise.contracts.chat import Message
from turnwise.contracts.environment import Response, check_reset, check_step
from turnwise.contracts.inference import InferenceBackend, Request
from turnwise.contracts.rollout import EnvironmentTimeout, Frame, Record, ReplayDiffers, RolloutSettings, TagPlan
from turnwise.data.exact import encode
from turnwise.data.trajectory import Generation
from turnwise.errors import EngineError, EnvironmentFailure, PluginError, TurnwiseError, one_line
from turnwise.rollout.gate import Gate
from turnwise.rollout.hosts import HOSTS, Host
from turnwise.rollout.seeds import request_seed
from turnwise.rollout.sweeper import Sweeper

logger = logging.getLogger(__name__)

MANAGER = "its environment manager"
"""What an episode waits for between its calls to the environment and to the model."""


class Pool:
    """The environments of one tag. Idle ones are reused; what failed is never used again. `starts`: how many processes
    may start at once."""

    def __init__(self, plan: TagPlan, settings: RolloutSettings, sweeper: Sweeper, starts: asyncio.Semaphore) -> None:
        self.plan = plan
        self.settings = settings
        self.gate: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if plan.max_concurrent_steps is not None:
            self.gate = asyncio.Semaphore(plan.max_concurrent_steps)
        self._sweeper = sweeper
        self._starts = starts
        self._idle: list[Host] = []

    async def take(self, note: Callable[[str], None]) -> Host:
        """An idle environment, or a new one. `note` is told what the episode waits for. Raises EnvironmentFailure where
        it cannot be built."""
        if self._idle:
            return self._idle.pop()
        host = HOSTS[self.plan.step](self.plan.tag, self.plan.build, self._sweeper)
        try:
            if self.plan.step == "process":
                note("its turn to start a process")
                # Its clock begins with its turn: all at once would take each other's time, and fail as environments
                # that hang.
                async with self._starts:
                    note("its environment's process")
                    await host.call("start", self.settings.reset_timeout)
            note("its turn to build an environment")
            async with self.gate:
                note("its environment's build")
                await host.call("build", self.settings.reset_timeout)
        except EnvironmentFailure:
            await host.discard(self.settings.step_timeout)
            raise
        return host

    def give(self, host: Host) -> None:
        """Take back an environment whose last call went well."""
        self._idle.append(host)

    async def close(self) -> None:
        """Close all idle environments, at most `step_timeout` long."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(host.close(self.settings.step_timeout) for host in idle))


class HostedEnvironment:
    """The environment of one episode, as its manager sees it (turnwise.contracts.env_manager.EpisodeEnvironment).

    With `frames`, what `render()` returns after each call is appended there. `note` is told what the episode waits for.
    """

    __slots__ = ("_calls", "_frames", "_gate", "_host", "_note", "_options", "_record", "_seed", "_settings", "_tag")

    def __init__(
        self,
        host: Host,
        pool: Pool,
        seed: int,
        options: dict[str, int] | None,
        frames: list[Frame] | None,
        note: Callable[[str], None],
        record: Record | None = None,
    ) -> None:
        self._host = host
        self._gate = pool.gate
        self._tag = pool.plan.tag
        self._settings = pool.settings
        self._seed = seed
        self._options = options
        self._frames = frames
        self._note = note
        self._record, self._calls = record, 0

    async def reset(self) -> tuple[Any, dict[str, Any]]:  # Any: an observation, and what an environment informs of
        """Reset with the group's seed and options. Raises EnvironmentFailure."""
        self._note("its environment's reset")
        async with self._gate:
            result = await self._host.call(
                "reset", self._settings.reset_timeout, seed=self._seed, options=self._options
            )
            checked = check_reset(result, self._tag)
            if self._frames is not None:
                await self._render(self._frames)
        self._note(MANAGER)
        self._compare(checked[:1])
        return checked

    async def step(
        self, action: str, response: Response | None = None
    ) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # Any: as in `reset`
        """One step. Raises EnvironmentFailure."""
        self._note("its environment's step")
        async with self._gate:
            result = await self._host.call("step", self._settings.step_timeout, action=action, response=response)
            checked = check_step(result, self._tag)
            if self._frames is not None:
                await self._render(self._frames)
        self._note(MANAGER)
        self._compare(checked[:4])
        return checked

    def _compare(self, returned: tuple[Any, ...]) -> None:  # Any: as in `reset`
        """Note what a call returned, or compare it with what it returned before. Raises ReplayDiffers."""
        if self._record is None:
            return
        digest, before = digested(returned), self._record.digests[self._calls : self._calls + 1]
        self._calls += 1
        if not before:
            self._record.digests.append(digest)
        elif not digest or before != [digest]:
            raise ReplayDiffers(f"{self._tag}: call {self._calls} of the replayed episode returned something else.")

    async def _render(self, frames: list[Frame]) -> None:
        self._note("its environment's render")
        try:
            frame = await self._host.call("render", self._settings.step_timeout)
        except EnvironmentTimeout:
            raise
        except EnvironmentFailure as failure:  # the episode itself is whole: it is played on, without pictures
            logger.warning("%s; this episode gives no frames", failure)
            frames.clear()
            self._frames = None
            return
        if frame is not None:
            frames.append(frame)


def digested(value: Any) -> str:  # Any: what an environment returns
    """A digest of plain data and arrays; empty for what has none."""
    try:
        text, buffer = encode(value)
    except TypeError:
        return ""
    return hashlib.blake2b(text + buffer, digest_size=16).hexdigest()


class Requests:
    """A backend behind its boundary: a request's timeout, and what was given up and must be aborted (appended to
    `given_up`).

    `stop` is called with an EngineError when a request takes longer than `request_timeout`; `note` is told what the
    episode waits for.
    """

    def __init__(
        self,
        backend: InferenceBackend,
        settings: RolloutSettings,
        sweeper: Sweeper,
        stop: Callable[[TurnwiseError], None],
        given_up: list[tuple[InferenceBackend, Request]],
        note: Callable[[str], None],
        gate: Gate,
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.given_up = given_up
        self._sweeper = sweeper
        self._stop = stop
        self._note = note
        self._gate = gate

    async def send(self, request: Request) -> Generation:
        """The backend's answer, once its gate is open. Whatever it raises becomes an EngineError."""
        self._note("the gate of the backend")
        async with self._gate.through():
            return await self._sent(request)

    async def _sent(self, request: Request) -> Generation:
        self._note("the model's answer")
        key = self._sweeper.watch(self.settings.request_timeout, partial(self._expire, request))
        try:
            return await self.backend.generate(request)
        except asyncio.CancelledError:
            self.given_up.append((self.backend, request))
            raise
        except (TurnwiseError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # sys.exit() in a backend is no end of the run, either
            raise EngineError(
                f"the inference backend raised {one_line(error)} for {_name(request)}. Fix: look into its log, or"
                " repair the plugin."
            ) from error
        finally:
            self._sweeper.release(key)
            self._note(MANAGER)

    def _expire(self, request: Request) -> None:
        seconds = f"{self.settings.request_timeout:g} s"
        self._stop(
            EngineError(
                f"the inference backend did not answer {_name(request)} within request_timeout: {seconds}. Fix: raise"
                " request_timeout."
            )
        )


class EpisodeSampler:
    """The model of one attempt, as its manager sees it (turnwise.contracts.env_manager.Sampler). `tokens`: how many it
    has sampled, those of the record among them, replayed or not."""

    __slots__ = (
        *("_attempt", "_member", "_order", "_record", "_replayed", "_requests", "_seed", "_tag"),
        *("input", "tokens"),
    )

    def __init__(
        self,
        requests: Requests,
        tag: str,
        seed: int,
        group: int,
        member: int,
        attempt: int,
        record: Record | None = None,
    ) -> None:
        self._record = record
        # What the record holds from now on is this attempt's own.
        self._replayed = {} if record is None else dict(record.generations)
        self.tokens = 0 if record is None else record.tokens
        self.input: str = requests.backend.input
        self._requests = requests
        self._tag = tag
        self._seed = seed
        self._member = member
        self._attempt = attempt
        self._order = (int(requests.settings.evaluation), group, member, attempt)

    async def generate(
        self,
        *,
        turn: int,
        ids: np.ndarray | None = None,
        messages: list[Message] | None = None,
        images: tuple[np.ndarray, ...] = (),
        max_new_tokens: int,
        actions: tuple[str, ...] = (),
    ) -> Generation:
        """Sample the response of turn `turn`, or give the one that was sampled. Raises EngineError; PluginError for
        a turn that was asked for before, where episodes are recorded: one of the two would be lost."""
        if turn in self._replayed:
            return self._replayed.pop(turn)
        if self._record is not None and turn in self._record.generations:
            raise PluginError(
                f"the environment manager of {self._tag} asked twice for turn {turn} of an episode. Fix: number its"
                " calls of the model 0, 1, 2, …, those of every sampler together"
            )
        request = Request(
            seed=request_seed(self._seed, self._member, self._attempt, turn),
            args=self._requests.settings.generating_args,
            max_new_tokens=max_new_tokens,
            order=(*self._order, turn),
            ids=ids,
            messages=None if messages is None else tuple(messages),
            images=images,
            actions=actions,
            tag=self._tag,
        )
        generation = await self._requests.send(request)
        self.tokens += generation.tokens
        if self._record is not None:
            self._record.generations[turn] = generation
        return generation


def _name(request: Request) -> str:
    _, group, member, attempt, turn = request.order
    return f"turn {turn} of {request.tag}, group {group}, member {member}, attempt {attempt}"
