"""The groups of the steps that are under way: which wait, which play, which are finished; and all of that as plain
data."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define, field

from turnwise.contracts.rollout import Played, Record, RolloutResult, RolloutSettings, TagPlan
from turnwise.errors import CheckpointError
from turnwise.rollout import kept
from turnwise.rollout.seeds import REPLACEMENT, environment_seed, task_index

COUNTS = (
    "attempts",
    "retries",
    "env_failures",
    "env_timeouts",
    "dropped_members",
    "replaced_groups",
    "discarded_episodes",
    "discarded_tokens",
)

Place = tuple[int, int, int]
"""An attempt of a run: (serial number of the group, member, attempt)."""


@define(eq=False)
class Group:
    """The group in one slot of a step, or its `round`-th replacement. `local`: its place among the groups of its tag in
    the step.

    `outcomes`: by member, what it played, None if it was given up. `attempts`: by member, the number of the attempt
    that it is at, or begins with. `playing`: the members that are in the middle of one. `records`: of the attempts that
    members are at; those of `resumed` begin with theirs, those of `anew` were cut and begin again. `counts` and
    `failures` are the slot's: a replacement goes on with those of the group that it replaces.
    """

    step: int
    slot: int
    local: int
    round: int
    plan: TagPlan
    serial: int
    seed: int
    options: dict[str, int] | None
    rendered: range
    outcomes: dict[int, Played | None] = field(factory=dict)
    attempts: dict[int, int] = field(factory=dict)
    playing: set[int] = field(factory=set)
    records: dict[int, Record] = field(factory=dict)
    resumed: set[int] = field(factory=set)
    anew: set[int] = field(factory=set)
    counts: Counter[str] = field(factory=Counter)
    failures: list[tuple[Place, str]] = field(factory=list)

    @property
    def finished(self) -> bool:
        """Whether every member has an outcome."""
        return len(self.outcomes) == self.plan.group_size

    @property
    def usable(self) -> int:
        """Members that were played to their end."""
        return sum(outcome is not None for outcome in self.outcomes.values())

    def begin(self, member: int, attempt: int) -> Place:
        """A member plays this attempt from now on."""
        self.playing.add(member)
        if member not in self.resumed:
            self.records[member] = Record()
        self.resumed.discard(member)
        self.attempts[member] = attempt
        self.counts["attempts"] += 1
        self.counts["retries"] += attempt > 0
        return self.serial, member, attempt


@define(eq=False)
class Step:
    """The groups of one step, by slot: at any time one group in each. `render`: of how many episodes of a tag frames
    are wanted. `taken`: its episodes were given out, and are kept until they are trained."""

    number: int
    render: int
    planned: int
    groups: dict[int, Group] = field(factory=dict)
    unfinished: int = 0
    taken: bool = False

    def count(self, name: str) -> int:
        """A number over all its groups and those that they replaced."""
        return sum(group.counts[name] for group in self.groups.values())

    def failed_tags(self) -> dict[str, int]:
        """Failed attempts by tag, of the tags that have any."""
        failed: Counter[str] = Counter()
        for group in self.groups.values():
            failed[group.plan.tag] += group.counts["env_failures"]
        return {tag: count for tag, count in failed.items() if count}


class GroupBuffer:
    """Holds the groups of every admitted step until it is trained. It starts nothing and knows no clock.

    Group s of step q has the serial number q·G + s (G: groups a step), its r-th replacement that plus r·2**32; seeds
    and tasks follow from it, so the order in which groups finish changes nothing. What waits is ordered by (step, slot,
    member):
    a replacement, which keeps its slot, goes before what belongs to later steps, else a step's last group would wait
    for the whole of the next.
    """

    def __init__(self, plans: Sequence[TagPlan], settings: RolloutSettings) -> None:
        self._settings = settings
        self._slots = [(plan, local) for plan in plans for local in range(plan.groups)]
        self._planned = sum(plan.groups * plan.group_size for plan in plans)
        self._steps: dict[int, Step] = {}
        self.restarted = 0
        """Episodes that could not go on from their record."""
        self._waiting: list[tuple[int, int, int]] = []

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def __len__(self) -> int:
        """How many steps are under way."""
        return len(self._steps)

    def step(self, number: int) -> Step:
        """A step that was admitted and not yet forgotten."""
        return self._steps[number]

    @property
    def whole(self) -> bool:
        """Whether every admitted step is finished, replacements included."""
        return not any(step.unfinished for step in self._steps.values())

    # ---------------------------------------------------------------- a step from its admission until it is trained

    def admit(self, step: int, *, render: int = 0) -> bool:
        """Let the groups of a step wait to be played. False, and nothing happens, from `max_steps` on: nobody would
        train on them."""
        if self._settings.max_steps is not None and step >= self._settings.max_steps:
            return False
        assert step not in self._steps
        self._steps[step] = Step(step, render, self._planned, unfinished=len(self._slots))
        for slot in range(len(self._slots)):
            self._enter(self._group(step, slot, 0, render))
        return True

    def start(self) -> tuple[Group, int] | None:
        """The (group, member) that is next to play, which waits no longer; None where nothing waits."""
        if not self._waiting:
            return None
        # Of a group that was replaced nobody waits any more: it was finished, so all its members had begun.
        step, slot, member = heapq.heappop(self._waiting)
        return self._steps[step].groups[slot], member

    def end(self, group: Group, member: int, outcome: Played | None) -> None:
        """A member has been played, or given up (None). A group left without enough members is replaced, in its slot.

        Two members at least are needed to compare anything, one in groups of one. In evaluation nothing is replaced:
        its tasks are fixed.
        """
        step = self._steps[group.step]
        group.playing.discard(member)
        group.records.pop(member, None)
        group.outcomes[member] = outcome
        if not group.finished:
            return
        if self._settings.evaluation or group.usable >= min(2, group.plan.group_size):
            step.unfinished -= 1
            return
        group.counts["replaced_groups"] += 1
        group.counts["discarded_episodes"] += group.usable
        group.counts["discarded_tokens"] += sum(_tokens(played) for played in group.outcomes.values() if played)
        replacement = self._group(group.step, group.slot, group.round + 1, step.render)
        replacement.counts, replacement.failures = group.counts, group.failures
        self._enter(replacement)

    def finished(self, step: int) -> bool:
        """Whether all groups of an admitted step are finished."""
        return not self._steps[step].unfinished

    def take(self, step: int) -> RolloutResult:
        """A finished step, in (group, member) order, whatever the order in which it was played. The buffer holds it
        until `forget`: what was not trained is still to be saved."""
        assert self.finished(step)
        self._steps[step].taken = True
        return _result(self._steps[step])

    def forget(self, before: int) -> None:
        """The steps below `before` are trained."""
        for number in [number for number in self._steps if number < before]:
            del self._steps[number]

    def give_up(self) -> None:
        """Forget the steps that are not finished; they will be admitted, and played, from their beginning."""
        for number in [number for number, step in self._steps.items() if step.unfinished]:
            del self._steps[number]
        self._waiting.clear()

    def pause(self) -> None:
        """Nobody plays any more: what is open will be begun again, from its record."""
        for step in self._steps.values():
            for group in step.groups.values():
                # As in a snapshot: the run that goes on counts them when they begin again.
                _uncount(group, group.counts)
                group.playing.clear()
        self._waiting.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._steps.clear()
        self._waiting.clear()

    def gauges(self) -> dict[str, int]:
        """How many groups wait (no member has begun), play, and are finished and not yet taken."""
        found = dict.fromkeys(("waiting", "playing", "finished"), 0)
        for step in self._steps.values():
            for group in () if step.taken else step.groups.values():
                begun = group.playing or group.outcomes
                found["finished" if group.finished else "playing" if begun else "waiting"] += 1
        return found

    def _enter(self, group: Group) -> None:
        self._steps[group.step].groups[group.slot] = group
        for member in range(group.plan.group_size):
            if member not in group.outcomes:
                heapq.heappush(self._waiting, (group.step, group.slot, member))

    def _group(self, step: int, slot: int, round: int, render: int) -> Group:
        plan, local = self._slots[slot]
        seed, evaluation = self._settings.seed, self._settings.evaluation
        serial = step * len(self._slots) + slot + round * REPLACEMENT
        options = None
        if plan.num_tasks is not None:
            of_tag = step * plan.groups + local + round * REPLACEMENT
            # An evaluation plays the same rows each time; training walks through permutations of all.
            options = {
                "index": of_tag % plan.num_tasks if evaluation else task_index(seed, plan.tag, of_tag, plan.num_tasks)
            }
        return Group(
            step=step,
            slot=slot,
            local=local,
            round=round,
            plan=plan,
            serial=serial,
            seed=environment_seed(seed, plan.tag, serial, evaluation=evaluation),
            options=options,
            rendered=range(max(render - local * plan.group_size, 0)),
        )

    # ---------------------------------------------------------------- as plain data

    def snapshot(self, first: int = 0) -> list[dict[str, Any]]:  # Any: records of several shapes, as data.exact's
        """Every group of the steps from `first` on, in (step, slot) order, as lists, dicts, numbers, trajectories and
        samples.

        A member that has ended is kept as what it played; one that waits or plays by its identity alone: group, member
        and the attempt that it is at, which `restore` begins again.
        """
        steps = [step for number, step in sorted(self._steps.items()) if number >= first]
        return [_written(step.groups[slot]) for step in steps for slot in sorted(step.groups)]

    def restore(self, groups: Iterable[dict[str, Any]]) -> None:  # Any: as `snapshot`
        """Take up a `snapshot`, in place of all that is here: ended members are taken as they are, all others wait.

        One that has a record begins with that, its environment reset; of an environment that is not replayable the next
        attempt begins. Raises CheckpointError for groups that these plans and this seed would not have played."""
        self.clear()
        try:
            for record in groups:
                self._read(record)
            if any(len(step.groups) != len(self._slots) for step in self._steps.values()):
                raise CheckpointError(
                    f"the checkpoint's queue was filled with other groups a step than the {len(self._slots)} of this"
                    " run. Fix: the num_env_groups that it was saved with, or another checkpoint."
                )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            self.clear()
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                "the checkpoint's queue of groups cannot be read. Fix: resume from another checkpoint."
            ) from error

    def _read(self, record: dict[str, Any]) -> None:  # Any: as `snapshot`
        number, slot, round = record["step"], record["slot"], record["round"]
        if not all(type(one) is int and 0 <= one < kept.LARGEST for one in (number, slot, round)):
            raise ValueError(f"step {number!r:.20}, slot {slot!r:.20}, round {round!r:.20}")
        group = self._group(number, slot, round, 0) if slot < len(self._slots) else None
        if group is None or _identity(group) != record["identity"]:
            raise CheckpointError(
                f"the checkpoint's queue holds a group of tag {record['identity'][0]!r} in place {slot} of step"
                f" {number}, which this run would not play. Fix: the tags, num_env_groups, group_size and seed that it"
                " was saved with, or another checkpoint."
            )
        for member, trajectories, samples in record["members"]:
            of = (group.plan.tag, group.serial, member, group.seed)
            group.outcomes[member] = None if trajectories is None else kept.played(trajectories, samples, of)
        group.attempts = kept.numbers(record["open"])
        members = {*group.outcomes, *group.attempts}
        if sorted(members) != list(range(group.plan.group_size)) or len(members) < len(
            record["members"] + record["open"]
        ):
            raise ValueError(f"members {members!r:.80}")
        group.counts = Counter(kept.counts(record["counts"]))
        for member, *written in record.get("records", ()):
            self._take_up(group, member, kept.record(*written))
        group.failures = [kept.failure(*one) for one in record["failures"]]
        if number not in self._steps:
            self._steps[number] = Step(number, 0, self._planned, unfinished=len(self._slots))
        self._steps[number].unfinished -= group.finished
        self._enter(group)

    def _take_up(self, group: Group, member: int, record: Record) -> None:
        """An open member begins with its record where its environment can do again what it did."""
        if member not in group.attempts:
            raise ValueError(f"a record of member {member!r:.20}, which is not open")
        if group.plan.replayable:
            group.records[member] = record
            group.resumed.add(member)
        else:
            group.attempts[member] += 1
            group.anew.add(member)
            group.counts["discarded_tokens"] += record.tokens
            self.restarted += 1


def _identity(group: Group) -> list[str | int]:
    return [group.plan.tag, group.plan.group_size, group.serial, group.seed]


def _written(group: Group) -> dict[str, Any]:  # Any: as `GroupBuffer.snapshot`
    # A copy: what is taken off here is taken off in the snapshot alone.
    counts = Counter(group.counts)
    _uncount(group, counts)
    # An attempt whose environment was not yet reset has nothing behind it, and begins as one that waits.
    records = [[m, *kept.written(record)] for m, record in sorted(group.records.items()) if record.digests]
    return {
        "step": group.step,
        "slot": group.slot,
        "round": group.round,
        "identity": _identity(group),
        "counts": {name: count for name, count in counts.items() if count},
        "failures": [[*place, line] for place, line in group.failures],
        "members": [
            [m, o.trajectories, o.samples] if o is not None else [m, None, None]
            for m, o in sorted(group.outcomes.items())
        ],
        "open": [[m, group.attempts.get(m, 0)] for m in range(group.plan.group_size) if m not in group.outcomes],
    } | ({"records": records} if records else {})


def _uncount(group: Group, counts: Counter[str]) -> None:
    """The attempts in play will be begun, and counted, again."""
    for member in group.playing:
        counts["attempts"] -= 1
        counts["retries"] -= group.attempts[member] > 0


def _tokens(played: Played) -> int:
    """Sampled ones."""
    return sum(int(turn.response_mask.sum()) for one in played.trajectories for turn in one.turns)


def _result(step: Step) -> RolloutResult:
    # By serial, which is not the slot's order once a group was replaced.
    groups = sorted(step.groups.values(), key=lambda group: group.serial)
    played = [(group, member, group.outcomes[member]) for group in groups for member in sorted(group.outcomes)]
    kept = [(group, member, outcome) for group, member, outcome in played if outcome is not None]
    trajectories = [trajectory for _, _, outcome in kept for trajectory in outcome.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    counts = {name: float(step.count(name)) for name in COUNTS} | {
        "planned_episodes": float(step.planned),
        "episodes": float(len(kept)),
        "turns": float(len(turns)),
        "sampled_tokens": float(sum(_tokens(outcome) for _, _, outcome in kept)),
    }
    return RolloutResult(
        trajectories=trajectories,
        samples=[rows for _, _, outcome in kept for rows in outcome.samples],
        counts=counts,
        frames={
            (group.plan.tag, group.serial, member): outcome.frames for group, member, outcome in kept if outcome.frames
        },
        failures=[line for _, line in sorted(failure for group in groups for failure in group.failures)],
    )
