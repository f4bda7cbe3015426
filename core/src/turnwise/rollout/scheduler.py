"""The scheduler plays groups of episodes at once, retries and replaces what failed, and knows what is alive."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from attrs import define, field

from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import InferenceBackend
from turnwise.errors import CheckpointError, EngineError, EnvironmentFailure, TurnwiseError
from turnwise.rollout.hosts import EnvironmentTimeout
from turnwise.rollout.plan import RolloutResult, RolloutSettings, TagPlan
from turnwise.rollout.process import one_line
from turnwise.rollout.seeds import REPLACEMENT, environment_seed, task_index
from turnwise.rollout.stage import GRACE_SECONDS, EpisodeSpec, LocalStage, Played, Stage, WorkerLost


@define(eq=False)
class _Group:
    """One group in play. `local`: its place among the groups of its tag in the step. `outcomes`: per member, None if it was given up."""

    plan: TagPlan
    slot: int
    local: int
    round: int
    serial: int
    seed: int
    options: dict[str, Any] | None
    rendered: range
    outcomes: dict[int, Played | None] = field(factory=dict)


@define(eq=False)
class _Batch:
    """All groups of one step: those still in play and those that are done."""

    step: int
    render: int
    planned: int
    open_groups: int
    done: asyncio.Future[None]
    finished: list[_Group] = field(factory=list)
    tasks: set[asyncio.Task[None]] = field(factory=set)
    counts: Counter[str] = field(factory=Counter)
    failures: list[tuple[tuple[int, int, int], str]] = field(factory=list)
    failed_tags: Counter[str] = field(factory=Counter)

    def fail(self, error: BaseException) -> None:
        """End the batch with this error; the first one counts."""
        if not self.done.done():
            self.done.set_exception(error)


class Scheduler:
    """Plays the groups of `plans`, slots dealt tag after tag.

    Group s of step q has the serial number q·G + s (G: groups per step), its r-th replacement that plus r·2**32; every seed follows
    from it, so timing changes none. `chat` is None for a backend of `input: messages`. `stage`: where the episodes are played (None: here).
    """

    def __init__(
        self, plans: Sequence[TagPlan], settings: RolloutSettings, backend: InferenceBackend, chat: Chat | None, stage: Stage | None = None
    ) -> None:
        self.plans = tuple(plans)
        self.settings = settings
        self.backend = backend
        self.stage = LocalStage(self.plans, settings, backend, chat) if stage is None else stage
        self._slots = [(plan, local) for plan in self.plans for local in range(plan.groups)]
        self._open: dict[int, _Batch] = {}
        self._waiting: deque[tuple[_Batch, _Group, int]] = deque()
        self._running = 0
        self._told = -1

    async def next_batch(self, step: int, *, version: int) -> RolloutResult:
        """All groups of pipeline step `step`, played with the weights of `version`.

        Raises EngineError (the backend failed or did not answer), or EnvironmentFailure past `max_env_failure_rate`. With an
        `async_generation_ratio` r, groups of the steps up to version + r are started too and go on playing after the return.
        """
        assert not self.settings.evaluation, "next_batch belongs to training"
        ratio = self.settings.async_generation_ratio
        for ahead in range(step, step + ratio + 1):
            if ahead not in self._open and (ahead == step or ahead - ratio <= version):
                self._open[ahead] = self._begin(ahead, render=0)
        return await self._finish(step)

    async def evaluate(self, *, render: int = 0) -> RolloutResult:
        """The fixed tasks of an evaluation: serials 0…G−1, of a data set rows 0…n−1 per tag. Nothing is replaced; what could not be
        played is in `counts` and `failures`. `frames` holds those of the first `render` episodes of each tag. Errors as `next_batch`."""
        assert self.settings.evaluation, "evaluate needs settings with evaluation=True"
        self._open[0] = self._begin(0, render)
        return await self._finish(0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold: the queue of finished groups, which between two synchronous batches is empty."""
        assert not self._open, "state is taken between batches"
        return {"queue": []}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up a state of `state()`. Raises CheckpointError for one that this mode cannot have written."""
        if state.get("queue") != []:
            raise CheckpointError("the checkpoint's scheduler state is not that of a synchronous run. Fix: resume from another checkpoint.")

    async def close(self) -> None:
        """Cancel what still plays and close every environment; may be called twice."""
        await self._abort()
        await self.stage.close()

    # ---------------------------------------------------------------- a batch from beginning to end

    def _begin(self, step: int, render: int) -> _Batch:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        planned = sum(plan.groups * plan.group_size for plan in self.plans)
        batch = _Batch(step=step, render=render, planned=planned, open_groups=len(self._slots), done=done)
        for slot in range(len(self._slots)):
            self._enqueue(batch, slot, replacement=0)
        if not self._slots:
            done.set_result(None)
        self._fill()
        return batch

    async def _finish(self, step: int) -> RolloutResult:
        batch = self._open[step]
        try:
            await batch.done
        except BaseException:
            await self._abort()
            raise
        del self._open[step]
        return _result(batch)

    async def _abort(self) -> None:
        """Cancel every episode and abort its request, without waiting for anything that hangs."""
        batches = list(self._open.values())
        self._open.clear()
        self._waiting.clear()
        tasks = [task for batch in batches for task in batch.tasks]
        for batch in batches:
            if not batch.done.cancel() and not batch.done.cancelled():
                batch.done.exception()  # marks it as seen; the caller has it, or got that of an earlier step
        for task in tasks:
            task.cancel()
        self._running = 0
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_SECONDS)
        if batches:
            await self.stage.abort()
            self._tell()

    # ---------------------------------------------------------------- groups

    def _enqueue(self, batch: _Batch, slot: int, replacement: int) -> None:
        plan, local = self._slots[slot]
        seed = self.settings.seed
        serial = batch.step * len(self._slots) + slot + replacement * REPLACEMENT
        options = None
        if plan.num_tasks is not None:
            of_tag = batch.step * plan.groups + local + replacement * REPLACEMENT
            options = {"index": of_tag % plan.num_tasks if self.settings.evaluation else task_index(seed, plan.tag, of_tag, plan.num_tasks)}
        group = _Group(
            plan=plan,
            slot=slot,
            local=local,
            round=replacement,
            serial=serial,
            seed=environment_seed(seed, plan.tag, serial, evaluation=self.settings.evaluation),
            options=options,
            rendered=range(max(batch.render - local * plan.group_size, 0)),
        )
        self._waiting.extend((batch, group, member) for member in range(plan.group_size))

    def _fill(self) -> None:
        """Start waiting episodes as far as `max_concurrent` allows, then tell the backend: before any of them can send a request."""
        limit = None if self.settings.max_concurrent is None else self.settings.max_concurrent * self.stage.workers
        while self._waiting and (limit is None or self._running < limit):
            batch, group, member = self._waiting.popleft()
            task = asyncio.get_running_loop().create_task(self._member(batch, group, member))
            batch.tasks.add(task)
            self._running += 1
        self._tell()

    def _tell(self) -> None:
        if self._running != self._told:
            self._told = self._running
            self.backend.live(self._running)

    def _ended(self, batch: _Batch, group: _Group, member: int, outcome: Played | None) -> None:
        """One episode is over; its group may be, and its replacement takes its place in one change of the number alive."""
        if batch.done.done():  # the batch has failed; nothing is started for it any more
            return
        self._running -= 1
        group.outcomes[member] = outcome
        if len(group.outcomes) == group.plan.group_size:
            usable = sum(outcome is not None for outcome in group.outcomes.values())
            if self.settings.evaluation or usable >= min(2, group.plan.group_size):
                batch.finished.append(group)
                batch.open_groups -= 1
                if not batch.open_groups:
                    batch.done.set_result(None)
            else:
                batch.counts["replaced_groups"] += 1
                batch.counts["discarded_episodes"] += usable
                self._enqueue(batch, group.slot, group.round + 1)
        self._fill()

    # ---------------------------------------------------------------- episodes

    async def _member(self, batch: _Batch, group: _Group, member: int) -> None:
        """One member of a group: attempts until one is whole or none is left."""
        task = asyncio.current_task()
        assert task is not None
        try:
            outcome = None
            for attempt in range(self.settings.max_env_retries + 1):
                batch.counts["attempts"] += 1
                batch.counts["retries"] += attempt > 0
                try:
                    outcome = await self._attempt(batch, group, member, attempt)
                    break
                except Exception as error:
                    if isinstance(error, TurnwiseError) and not isinstance(error, EnvironmentFailure):
                        raise
                    self._count(batch, group, (group.serial, member, attempt), error)
            else:
                batch.counts["dropped_members"] += 1
            batch.tasks.discard(task)
            self._ended(batch, group, member, outcome)
        except Exception as error:
            batch.fail(error)
        except asyncio.CancelledError:
            if not batch.done.done():  # not by `_abort`: without this the batch would wait for ever
                place = f"{group.plan.tag}, group {group.serial}, member {member}"
                batch.fail(EngineError(f"the inference backend or the environment manager cancelled an episode ({place})."))
            raise

    async def _attempt(self, batch: _Batch, group: _Group, member: int, attempt: int) -> Played:
        spec = EpisodeSpec(
            tag=group.plan.tag,
            group=group.serial,
            member=member,
            attempt=attempt,
            seed=group.seed,
            options=group.options,
            rendered=member in group.rendered,
        )
        return await self.stage.play(spec, batch.fail)

    def _count(self, batch: _Batch, group: _Group, place: tuple[int, int, int], error: Exception) -> None:
        """Count a failed attempt. Raises EnvironmentFailure when there are too many of them."""
        serial, member, attempt = place
        cause = str(error) if isinstance(error, EnvironmentFailure) else f"the environment manager raised {one_line(error)}"
        line = f"{group.plan.tag}, group {serial}, member {member}, attempt {attempt}: {' '.join(cause.split())}"
        batch.failures.append((place, line))
        if isinstance(error, WorkerLost) and not error.counts:
            return
        batch.failed_tags[group.plan.tag] += 1
        batch.counts["env_failures"] += 1
        batch.counts["env_timeouts"] += isinstance(error, EnvironmentTimeout)
        failed, attempts = batch.counts["env_failures"], batch.counts["attempts"]
        if failed > self.settings.max_env_failure_rate * max(batch.planned, attempts):
            tags = ", ".join(f"{tag}: {count}" for tag, count in batch.failed_tags.items())
            what = "the evaluation" if self.settings.evaluation else f"step {batch.step}"
            raise EnvironmentFailure(
                f"{failed} attempts to play an episode failed in {what} ({tags}; {batch.planned} episodes planned, {attempts} attempts begun), "
                f"more than max_env_failure_rate: {self.settings.max_env_failure_rate:g} allows. Last cause: {line.rstrip('.')}. "
                "Fix: repair the environment, or raise max_env_failure_rate, step_timeout, reset_timeout or max_env_retries."
            ) from error


def _result(batch: _Batch) -> RolloutResult:
    """The batch in (group, member) order, and what there is to count."""
    groups = sorted(batch.finished, key=lambda group: group.serial)
    played = [(group, member, group.outcomes[member]) for group in groups for member in sorted(group.outcomes)]
    kept = [(group, member, outcome) for group, member, outcome in played if outcome is not None]
    turns = [turn for _, _, outcome in kept for turn in outcome.trajectory.turns]
    counts = dict.fromkeys(("attempts", "retries", "env_failures", "env_timeouts", "dropped_members", "replaced_groups", "discarded_episodes"), 0.0)
    counts |= {name: float(count) for name, count in batch.counts.items()}
    counts |= {
        "planned_episodes": float(batch.planned),
        "episodes": float(len(kept)),
        "turns": float(len(turns)),
        "sampled_tokens": float(sum(int(turn.response_mask.sum()) for turn in turns)),
    }
    return RolloutResult(
        trajectories=[outcome.trajectory for _, _, outcome in kept],
        samples=[outcome.samples for _, _, outcome in kept],
        counts=counts,
        frames={(group.plan.tag, group.serial, member): outcome.frames for group, member, outcome in kept if outcome.frames},
        failures=[line for _, line in sorted(batch.failures)],
    )
