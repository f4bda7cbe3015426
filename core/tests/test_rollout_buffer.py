"""The buffer of groups: the order of what waits, replacements, the end of a run, counts, and its state as plain data.
No event loop."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise.contracts.env_manager import Limits
from turnwise.contracts.rollout import Played, RolloutSettings, TagPlan
from turnwise.data import Sample, Trajectory
from turnwise.data.exact import decode, encode
from turnwise.errors import CheckpointError
from turnwise.rollout.buffer import Group, GroupBuffer
from turnwise.rollout.seeds import REPLACEMENT, environment_seed, task_index

LIMITS = Limits(sequence_length=8, max_new_tokens=1, max_tokens_per_step=1, max_turns=1)
SETTINGS = RolloutSettings(seed=3)


def plan(tag: str = "Lake", groups: int = 2, size: int = 2, num_tasks: int | None = None) -> TagPlan:
    return TagPlan(tag, build=object, manager=None, limits=LIMITS, groups=groups, group_size=size, num_tasks=num_tasks)  # type: ignore[arg-type]


def played(group: Group, member: int, attempt: int = 0) -> Played:
    trajectory = Trajectory(group.plan.tag, group.serial, member, group.seed, (), "turns", attempt=attempt)
    sample = Sample(np.zeros(1, np.int32), np.zeros(1, bool), np.full(1, -1, np.int32), None, np.full(1, -1, np.int32))
    return Played([trajectory], [[sample]], None)


def order(buffer: GroupBuffer) -> list[tuple[int, int]]:
    """(serial, member) of all that waits, in the order in which it would be played."""
    return [(group.serial, member) for group, member in iter(buffer.start, None)]


def play(buffer: GroupBuffer, number: int = 1, *, fails: bool = False) -> list[Group]:
    """Play the next `number` members to their end."""
    groups = []
    for _ in range(number):
        started = buffer.start()
        assert started is not None
        group, member = started
        for attempt in range(group.attempts.get(member, 0), 3 if fails else group.attempts.get(member, 0) + 1):
            group.begin(member, attempt)
        buffer.end(group, member, None if fails else played(group, member))
        groups.append(group)
    return groups


def test_what_waits_is_ordered_by_step_slot_and_member_however_it_was_admitted() -> None:
    buffer = GroupBuffer([plan(), plan("Box", groups=1, size=1)], SETTINGS)
    assert buffer.admit(1)
    assert buffer.admit(0)
    assert order(buffer) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1), (4, 0), (4, 1), (5, 0)]
    assert buffer.start() is None


def test_a_group_has_the_seed_and_the_task_of_its_serial_number() -> None:
    buffer = GroupBuffer([plan("Other", groups=1), plan(num_tasks=5)], SETTINGS)
    buffer.admit(4)
    groups = buffer.step(4).groups
    assert [group.serial for group in groups.values()] == [12, 13, 14]
    assert groups[2].seed == environment_seed(3, "Lake", 14)
    assert (groups[0].options, groups[2].options) == (None, {"index": task_index(3, "Lake", 9, 5)})


def test_a_group_without_two_members_is_replaced_in_its_slot_and_its_replacement_goes_first() -> None:
    buffer = GroupBuffer([plan(size=3)], SETTINGS)
    buffer.admit(0)
    buffer.admit(1)
    play(buffer)
    first = play(buffer, 2, fails=True)[0]
    first.failures.append(((0, 1, 0), "boom"))
    assert order(buffer)[:4] == [(REPLACEMENT, 0), (REPLACEMENT, 1), (REPLACEMENT, 2), (1, 0)]
    now = buffer.step(0).groups[0]
    assert (now.round, now.seed, now.failures) == (1, environment_seed(3, "Lake", REPLACEMENT), [((0, 1, 0), "boom")])
    assert (
        buffer.step(0).count("replaced_groups"),
        buffer.step(0).count("discarded_episodes"),
        buffer.step(0).count("attempts"),
    ) == (1, 1, 7)


def test_evaluation_replaces_nothing() -> None:
    buffer = GroupBuffer([plan(groups=1, size=1)], evolve(SETTINGS, evaluation=True))
    buffer.admit(0)
    play(buffer, fails=True)
    assert buffer.finished(0)
    assert buffer.take(0).trajectories == []


def test_nothing_is_admitted_from_max_steps_on() -> None:
    buffer = GroupBuffer([plan()], evolve(SETTINGS, max_steps=2))
    assert [buffer.admit(step) for step in range(4)] == [True, True, False, False]
    assert (len(buffer), 1 in buffer, 2 in buffer) == (2, True, False)


@given(st.permutations(range(6)))
def test_a_step_is_taken_in_the_order_of_groups_whatever_ended_first(ends: list[int]) -> None:
    buffer = GroupBuffer([plan(groups=3)], SETTINGS)
    buffer.admit(2)
    started = [buffer.start() for _ in range(6)]
    for number in ends:
        assert not buffer.finished(2)
        group, member = started[number] or (None, None)
        assert group is not None
        buffer.end(group, member, played(group, member))
    taken = buffer.take(2)
    assert [(t.group, t.member) for t in taken.trajectories] == [(6, 0), (6, 1), (7, 0), (7, 1), (8, 0), (8, 1)]
    # Whoever is killed before it is trained has not lost it.
    assert {record["step"] for record in buffer.snapshot()} == {2}
    assert buffer.gauges() == {"waiting": 0, "playing": 0, "finished": 0}
    buffer.forget(2)
    assert (len(buffer), buffer.snapshot(3)) == (1, [])
    buffer.forget(3)
    assert len(buffer) == 0


def test_gauges_count_groups_by_what_they_do() -> None:
    buffer = GroupBuffer([plan(groups=3)], SETTINGS)
    buffer.admit(0)
    assert buffer.gauges() == {"waiting": 3, "playing": 0, "finished": 0}
    play(buffer, 3)
    group, member = buffer.start() or (None, 0)
    assert group is not None
    assert buffer.gauges() == {"waiting": 1, "playing": 1, "finished": 1}
    buffer.end(group, member, None)
    started = buffer.start()
    assert started is not None
    started[0].begin(started[1], 0)
    assert buffer.gauges() == {
        "waiting": 1,
        "playing": 1,
        "finished": 1,
    }  # the second was replaced: its new members play


def under_way() -> GroupBuffer:
    """Step 0 with a finished group, one replaced, one member of which has ended and one plays its second attempt; step
    1 waits."""
    buffer = GroupBuffer([plan(groups=2, size=2)], SETTINGS)
    buffer.admit(0)
    buffer.admit(1)
    play(buffer, 2)
    play(buffer, 2, fails=True)
    play(buffer)
    group, member = buffer.start() or (None, 0)
    assert group is not None
    group.failures.append((group.begin(member, 0), "boom"))
    group.counts["env_failures"] += 1
    group.begin(member, 1)
    return buffer


def test_a_snapshot_is_plain_data_and_taken_up_it_goes_on_where_it_was() -> None:
    buffer = under_way()
    text = encode(buffer.snapshot())
    other = GroupBuffer([plan(groups=2, size=2)], SETTINGS)
    other.restore(decode(*text))
    assert encode(other.snapshot()) == text
    assert other.gauges() == {"waiting": 2, "playing": 1, "finished": 1}
    replaced = other.step(0).groups[1]
    assert (replaced.round, sorted(replaced.outcomes), replaced.attempts) == (1, [0], {1: 1})
    assert replaced.failures == [((1 + REPLACEMENT, 1, 0), "boom")]
    play(other)  # what waited first: the member that played
    assert other.finished(0)
    assert not other.finished(1)
    play(buffer, 0)
    group = buffer.step(0).groups[1]
    buffer.end(group, 1, played(group, 1, attempt=1))
    there, here = other.take(0), buffer.take(0)
    assert (there.counts, there.failures) == (here.counts, here.failures)
    assert [(t.group, t.member) for t in there.trajectories] == [(t.group, t.member) for t in here.trajectories]
    assert there.counts["attempts"] == 2 + 6 + 1 + 2
    assert order(other) == [(2, 0), (2, 1), (3, 0), (3, 1)]


def test_a_snapshot_without_groups_is_empty_and_can_stand_in_json() -> None:
    buffer = GroupBuffer([plan()], SETTINGS)
    assert json.dumps(buffer.snapshot()) == "[]"
    buffer.restore([])
    assert len(buffer) == 0


@pytest.mark.parametrize(
    ("plans", "settings"),
    [
        ([plan(groups=3)], SETTINGS),
        ([plan(size=3)], SETTINGS),
        ([plan(groups=1)], SETTINGS),
        ([plan("Pond")], SETTINGS),
        ([plan()], evolve(SETTINGS, seed=4)),
    ],
)
def test_groups_that_this_run_would_not_play_are_refused(plans: list[TagPlan], settings: RolloutSettings) -> None:
    buffer = GroupBuffer(plans, settings)
    with pytest.raises(CheckpointError, match=r"a group of tag 'Lake' in place \d of step \d.* Fix: "):
        buffer.restore(under_way().snapshot())
    assert len(buffer) == 0


@pytest.mark.parametrize(
    "damage", [1, {}, {"step": 0, "slot": "x", "round": 0}, {"step": 0, "slot": 0, "round": 0, "identity": None}]
)
def test_a_snapshot_that_cannot_be_read_is_an_error(damage: Any) -> None:
    with pytest.raises(CheckpointError, match="queue"):
        GroupBuffer([plan()], SETTINGS).restore([damage])
