"""The scheduler runs the attempts at the episodes of the buffer's groups, many at once, and knows how many are
alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import InferenceBackend
from turnwise.contracts.rollout import (
    EnvironmentTimeout,
    EpisodeSpec,
    Executor,
    Played,
    ReplayDiffers,
    RolloutResult,
    RolloutSettings,
    TagPlan,
    WorkerLost,
)
from turnwise.errors import CheckpointError, EngineError, EnvironmentFailure, TurnwiseError, one_line
from turnwise.rollout.buffer import Group, GroupBuffer, Place
from turnwise.rollout.occupancy import Occupancy
from turnwise.rollout.watchdog import Watchdog
from turnwise.rollout.worker import GRACE_SECONDS, LocalExecutor

logger = logging.getLogger(__name__)


class Scheduler:
    """Plays the groups of `plans`, slots dealt tag after tag; which groups those are, the buffer knows (`GroupBuffer`).

    `chat` is None for a backend of `input: messages`. `executor`: where the episodes are played (None: here).
    """

    def __init__(
        self,
        plans: Sequence[TagPlan],
        settings: RolloutSettings,
        backend: InferenceBackend,
        chat: Chat | None,
        executor: Executor | None = None,
    ) -> None:
        self.plans = tuple(plans)
        self.settings = settings
        self.backend = backend
        self.executor = LocalExecutor(self.plans, settings, backend, chat) if executor is None else executor
        self.buffer = GroupBuffer(self.plans, settings)
        self._occupancy = Occupancy(backend)
        self._watchdog = Watchdog(self.executor, settings.stall_timeout)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._working, self._worked, self._noted = False, 0.0, 0.0
        self._held = False
        self.replayed = 0
        """Episodes that went on from their record."""
        self._differed: list[str] = []
        self.executor.listen(self._changed)

    async def next_batch(self, step: int, *, version: int) -> RolloutResult:
        """All groups of pipeline step `step`, while the backend serves the weights of `version`.

        First admits what these weights may play: the groups of the steps up to version + r, r the
        `async_generation_ratio`, as far as `max_steps` goes. Those of later steps go on playing after the return.
        Raises EngineError (the backend failed or did not answer), or EnvironmentFailure past `max_env_failure_rate`.
        """
        assert not self.settings.evaluation, "next_batch belongs to training"
        assert version <= step, "a step is trained before the weights that it makes are published"
        # Before anything is admitted: at most r + 1 steps are held, and nothing else bounds what is finished. Within a
        # bound of their own the groups of a later step could take all the room, and this one would never be whole.
        self.buffer.forget(step)
        for ahead in range(step, version + self.settings.async_generation_ratio + 1):
            if ahead not in self.buffer:
                self.buffer.admit(ahead)
        assert step in self.buffer, "neither a step past max_steps nor one that these weights may not play is asked for"
        try:
            await self._play(lambda: self.buffer.finished(step))
        finally:
            self._tell_differed()
        return self.buffer.take(step)

    def _tell_differed(self) -> None:
        """One line for all episodes that could not be replayed since the last: there may be as many as were open."""
        if self._differed:
            logger.warning(
                "%d open episodes of the checkpoint start anew: their environments do not repeat what they did (the"
                " first: %s)",
                len(self._differed),
                self._differed[0].rstrip("."),
            )
            self._differed.clear()

    async def settled(self, version: int) -> None:
        """Wait until the weights of `version` may take the place of those that serve, by `weight_update`: until every
        admitted group is finished, so that each step is played with one version; until no response is on its way; or at
        once, with no time passing for requests until `release`. What is stranded without new weights is not waited for.
        Errors as `next_batch`."""
        self.buffer.forget(version)
        if not self.settings.cuts_episodes:
            await self._play(lambda: self.buffer.whole or self.executor.stranded())
        elif self.settings.weight_update == "between_turns":
            await self._hold(lambda: not self.executor.flying() or self.executor.stranded())
        else:
            await self.executor.freeze()

    async def hold(self) -> None:
        """Let episodes send nothing more, wait until what was sent is answered, and bring their records up to date.
        Errors as `next_batch`."""
        if self.settings.cuts_episodes:
            await self._hold(lambda: not self.executor.flying())
            await self.executor.records()

    async def _hold(self, until: Callable[[], bool]) -> None:
        self._held = True
        await self.executor.hold()
        await self._play(until)

    async def release(self) -> None:
        """Undo `hold` and `settled`."""
        if self.settings.cuts_episodes:
            self._held = False
            # A backend learns first how many may ask, then they do.
            self._report()
            await self.executor.release()

    def _report(self) -> None:
        """After every change of who plays. How many may ask the backend: while episodes are held, those alone who asked
        before."""
        self._note_work()
        self._occupancy.set(self.executor.flying() if self._held else len(self._tasks))

    def _changed(self) -> None:
        try:
            self._report()
        # of the backend's `live`: nobody looks at what calls this
        except Exception as error:
            self._fail(error)
        self._wake()

    async def evaluate(self, *, render: int = 0) -> RolloutResult:
        """The fixed tasks of an evaluation: serials 0…G−1, of a data set rows 0…n−1 per tag. Nothing is replaced; what
        could not be played is in `counts` and `failures`. `frames` holds those of the first `render` episodes of each
        tag. Errors as `next_batch`."""
        assert self.settings.evaluation, "evaluate needs settings with evaluation=True"
        self.buffer.admit(0, render=render)
        await self._play(lambda: self.buffer.finished(0))
        played = self.buffer.take(0)
        self.buffer.clear()
        return played

    def worked(self) -> float:
        """Seconds in which any episode was alive and not held, since this was last asked."""
        self._note_work()
        worked, self._worked = self._worked, 0.0
        return worked

    def _note_work(self) -> None:
        """After the number of tasks, or the gate, has changed: what has passed was spent as it was before."""
        now = asyncio.get_running_loop().time()
        if self._working:
            self._worked += now - self._noted
        self._noted = now
        # Held, with all answered: an evaluation, or the weights' way, has the sampler's time.
        held = self._held and not self.executor.flying()
        self._working = bool(self._tasks) and not held

    def gauges(self) -> dict[str, float]:
        """Metrics of what is played ahead; {} where nothing is."""
        if not self.settings.async_generation_ratio:
            return {}
        found = {f"async/groups/{name}": float(count) for name, count in self.buffer.gauges().items()}
        resumed = {"resume/replayed": float(self.replayed), "resume/restarted": float(self.buffer.restarted)}
        return found | (resumed if self.settings.cuts_episodes else {})

    def state(self, first: int = 0) -> dict[str, Any]:  # Any: as `GroupBuffer.snapshot`
        """What a checkpoint after `first` steps must hold: the queue of groups, which between two synchronous batches
        is empty."""
        return {"queue": self.buffer.snapshot(first)}

    def load_state(self, state: dict[str, Any]) -> None:  # Any: as `state`
        """Take up a state of `state()`. Raises CheckpointError for one that this run cannot go on with."""
        if not isinstance(state.get("queue"), list):
            raise CheckpointError(
                "the checkpoint's scheduler state holds no queue of groups. Fix: resume from another checkpoint."
            )
        self.buffer.restore(state["queue"])

    async def close(self) -> None:
        """Cancel what still plays and close every environment; may be called twice."""
        await self._abort()
        await self.executor.close()

    # ---------------------------------------------------------------- from beginning to end

    async def _play(self, until: Callable[[], bool]) -> None:
        """Play until something is so. One failure ends all that plays: later steps are of no use without this one."""
        try:
            if self._failure is None:
                self._fill()
            while not until():
                if self._failure is not None:
                    raise self._failure
                self._waiter = asyncio.get_running_loop().create_future()
                await self._watchdog.wait(self._waiter)
        except BaseException:
            await self._abort()
            raise

    def _fail(self, error: BaseException) -> None:
        """End what plays with this error; the first one counts."""
        # What fails next mostly fails because of it: requests of an engine that is gone, one after the other.
        if self._failure is None:
            self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _abort(self) -> None:
        """Cancel every episode and abort its request, without waiting for anything that hangs. What is finished stays,
        and what is open where a record of it can be saved."""
        tasks = list(self._tasks)
        began = bool(tasks) or not self.buffer.whole
        if self.settings.cuts_episodes:
            self.buffer.pause()
        else:
            self.buffer.give_up()
        # `_member` and `_left` look here: what was given up changes neither the buffer nor the failure any more.
        self._tasks.clear()
        self._note_work()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_SECONDS)
        if began:
            await self.executor.abort()
            self._occupancy.set(0)
        self._failure = self._waiter = None

    def _fill(self) -> None:
        """Start waiting episodes as far as `max_concurrent` allows, then report how many are alive, before any can
        ask."""
        limit = None if self.settings.max_concurrent is None else self.settings.max_concurrent * self.executor.workers
        while limit is None or len(self._tasks) < limit:
            if (waiting := self.buffer.start()) is None:
                break
            # It runs at the next await, after `_report` below. No gather: the first failure must be seen at once, not
            # when the slowest episode has ended.
            task = asyncio.get_running_loop().create_task(self._member(*waiting))
            self._tasks.add(task)
            task.add_done_callback(partial(self._left, *waiting))
        self._report()

    # ---------------------------------------------------------------- episodes

    async def _member(self, group: Group, member: int) -> None:
        """One member of a group: attempts until one is whole or none is left. Whatever this raises ends the batch
        (`_left`)."""
        task = asyncio.current_task()
        assert task is not None
        outcome = None
        replays = member in group.resumed
        self.replayed += replays
        first = group.attempts.get(member, 0)
        # A resumed episode has one attempt more: what its environment does not, or cannot, do again is no failure.
        last = max(self.settings.max_env_retries, first) + (replays or member in group.anew)
        for attempt in range(first, last + 1):
            place = group.begin(member, attempt)
            try:
                outcome = await self._attempt(group, place)
                break
            except ReplayDiffers as error:
                self._differed.append(f"group {group.serial}, member {member} of {error}")
                self.replayed -= 1
                self.buffer.restarted += 1
                group.counts["discarded_tokens"] += error.sampled_tokens
            except EnvironmentFailure as error:
                self._count(group, place, error)
        else:
            group.counts["dropped_members"] += 1
        if task in self._tasks and self._failure is None:  # else nothing is started any more
            # Its group may be over: the replacement takes its place in one change of the number alive.
            self._tasks.discard(task)
            self.buffer.end(group, member, outcome)
            try:
                self._fill()
            # of the backend's `live`: this task is none of the batch's any more, so nobody would look at it
            except Exception as error:
                self._fail(error)
            if self.buffer.finished(group.step):
                self._wake()

    def _left(self, group: Group, member: int, task: asyncio.Task[None]) -> None:
        """A task has ended, in whatever way, also cancelled before its first line: without an outcome its step cannot
        end."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if task not in self._tasks:  # its member has its outcome, or `_abort` has given it up
            return
        self._tasks.discard(task)
        place = f"{group.plan.tag}, group {group.serial}, member {member}"
        if isinstance(error, asyncio.CancelledError):
            self._fail(EngineError(f"the inference backend or the environment manager cancelled an episode ({place})."))
        elif isinstance(error, Exception):
            self._fail(error)
        elif error is not None:
            ended = TurnwiseError(f"{place}: the episode ended by {one_line(error)}.")
            ended.__cause__ = error
            self._fail(ended)
        self._report()  # last: what a backend raises here ends a callback and nothing else

    async def _attempt(self, group: Group, place: Place) -> Played:
        serial, member, attempt = place
        spec = EpisodeSpec(
            tag=group.plan.tag,
            group=serial,
            member=member,
            attempt=attempt,
            seed=group.seed,
            options=group.options,
            rendered=member in group.rendered,
            record=group.records[member] if self.settings.cuts_episodes else None,
        )
        task = asyncio.current_task()
        # A request of an episode that was given up, and hangs on, may expire while others play: it is none of theirs.
        return await self.executor.play(spec, lambda error: self._fail(error) if task in self._tasks else None)

    def _count(self, group: Group, place: Place, error: EnvironmentFailure) -> None:
        """Count a failed attempt. Raises EnvironmentFailure when there are too many of them."""
        serial, member, attempt = place
        line = f"{group.plan.tag}, group {serial}, member {member}, attempt {attempt}: {' '.join(str(error).split())}"
        group.failures.append((place, line))
        group.counts["discarded_tokens"] += error.sampled_tokens
        if isinstance(error, WorkerLost) and not error.counts:
            return
        group.counts["env_failures"] += 1
        group.counts["env_timeouts"] += isinstance(error, EnvironmentTimeout)
        step = self.buffer.step(group.step)
        failed, attempts = step.count("env_failures"), step.count("attempts")
        if failed > self.settings.max_env_failure_rate * max(step.planned, attempts):
            tags = ", ".join(f"{tag}: {count}" for tag, count in step.failed_tags().items())
            what = "the evaluation" if self.settings.evaluation else f"step {step.number}"
            raise EnvironmentFailure(
                f"{failed} attempts to play an episode failed in {what} ({tags}; {step.planned} episodes planned,"
                f" {attempts} attempts begun), more than max_env_failure_rate: {self.settings.max_env_failure_rate:g}"
                f" allows. Last cause: {line.rstrip('.')}. Fix: repair what failed, or raise max_env_failure_rate,"
                " step_timeout, reset_timeout or max_env_retries."
            ) from error
