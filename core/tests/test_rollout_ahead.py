"""Groups played ahead of the weights: the bound on staleness, membership by serial number, and what is kept of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.contracts.env_manager import Limits, ManagerContext
from turnwise.contracts.inference import Request
from turnwise.contracts.rollout import Played, RolloutResult, RolloutSettings, TagPlan
from turnwise.data import Generation, Trajectory
from turnwise.data.exact import decode, encode
from turnwise.errors import CheckpointError, EngineError, TurnwiseError
from turnwise.rollout import Scheduler
from turnwise.rollout.buffer import Group, GroupBuffer
from turnwise.rollout.seeds import environment_seed
from turnwise.testing.fakes import FakeChat, FakeEnvironment, FakeEnvManager
from turnwise.testing.ticks import run_in_ticks

STEPS = 5
LIMITS = Limits(sequence_length=64, max_new_tokens=4, max_tokens_per_step=4, max_turns=3)
CALM = RolloutSettings(seed=11, step_timeout=5, reset_timeout=5, request_timeout=5, max_env_failure_rate=0.99)


class Backend:
    """Answers when `answer(request)` has; remembers requests and live counts in the order in which they came."""

    input = "ids"

    def __init__(self, answer: Callable[[Request], Any] | None = None) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.lives: list[int] = []

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.answer is not None:
            await self.answer(request)
        return Generation("ab", np.array([97, 98], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")

    def live(self, episodes: int) -> None:
        self.lives.append(episodes)

    async def abort(self, request: Request) -> None:
        pass


class Versioned(Backend):
    """Answers in an order that is drawn, with the version that is published."""

    def __init__(self, delays: list[int]) -> None:
        super().__init__(self._late)
        self.delays, self.version = delays, 0
        self.served: list[tuple[int, int]] = []

    async def _late(self, request: Request) -> None:
        self.served.append((request.order[1], self.version))
        for _ in range(self.delays[len(self.served) % len(self.delays)]):
            await asyncio.sleep(0)


def plan(groups: int = 2, build: Callable[[], Any] = FakeEnvironment) -> TagPlan:
    manager = FakeEnvManager(None, ManagerContext(tag="Count", max_turns=3))
    return TagPlan("Count", build, manager, LIMITS, groups=groups, group_size=2, step="inline")


def schedule(backend: Any, *plans: TagPlan, **options: Any) -> Scheduler:
    return Scheduler(plans or (plan(),), evolve(CALM, **options), backend, FakeChat())


def places(result: RolloutResult) -> list[tuple[int, int]]:
    return [(t.group, t.member) for t in result.trajectories]


def played(group: Group, member: int) -> Played:
    return Played([Trajectory(group.plan.tag, group.serial, member, group.seed, (), "turns")], [[]], None)


async def trained(scheduler: Scheduler, backend: Versioned, steps: int = STEPS) -> list[list[tuple[int, int]]]:
    """A run in `between_batches`: each step's episodes as they were trained."""
    out = []
    for step in range(steps):
        out.append(places(await scheduler.next_batch(step, version=step)))
        await asyncio.sleep(0)  # the trainer works, and others play
        await scheduler.settled(step + 1)
        assert scheduler.buffer.whole
        backend.version = step + 1
    return out


@settings(max_examples=40)
@given(st.integers(0, 3), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_every_step_is_played_with_one_version_and_no_token_is_older_than_the_ratio(
    ratio: int, delays: list[int]
) -> None:
    backend = Versioned(delays)

    async def run() -> list[list[tuple[int, int]]]:
        scheduler = schedule(backend, async_generation_ratio=ratio, max_steps=STEPS)
        out = await trained(scheduler, backend)
        await scheduler.close()
        return out

    out = run_in_ticks(run())
    # Whatever the order in which groups finished, group s of step q is the one of serial number q·G + s.
    assert out == [[(2 * step + s, member) for s in range(2) for member in range(2)] for step in range(STEPS)]
    for serial, version in backend.served:
        assert version == max(0, serial // 2 - ratio)
    assert {serial for serial, _ in backend.served} == set(range(2 * STEPS))  # nothing is played that is not trained


@settings(max_examples=100)
@given(st.integers(0, 3), st.data())
def test_what_is_open_is_bounded_by_admission_alone(ratio: int, data: st.DataObject) -> None:
    buffer, groups = GroupBuffer([plan(3)], evolve(CALM, max_steps=STEPS)), 3
    for step in range(STEPS):
        buffer.forget(step)
        for ahead in range(step, step + ratio + 1):
            if ahead not in buffer:
                buffer.admit(ahead)
        assert sum(buffer.gauges().values()) <= (ratio + 1) * groups
        while not buffer.finished(step):
            started = buffer.start()
            assert started is not None
            group, member = started
            assert step <= group.step <= min(step + ratio, STEPS - 1)
            group.begin(member, 0)
            fails = data.draw(st.booleans()) and group.round < 1
            buffer.end(group, member, None if fails else played(group, member))
        taken = buffer.take(step)
        serials = sorted({t.group % 2**32 for t in taken.trajectories})
        assert serials == [step * groups + s for s in range(groups)]


def test_a_stop_keeps_the_steps_that_are_finished_and_begins_the_others_anew() -> None:
    backend = Backend()

    async def answer(request: Request) -> None:
        if request.order[1] == 5:  # the last group of step 2
            await asyncio.sleep(60)

    backend.answer = answer

    async def run() -> dict[str, Any]:
        scheduler = schedule(backend, async_generation_ratio=2)
        await scheduler.next_batch(0, version=0)
        waiting = asyncio.ensure_future(scheduler.settled(1))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        state = scheduler.state(1)
        await scheduler.close()
        return state

    state = run_in_ticks(run())
    assert [(group["step"], group["identity"][2]) for group in state["queue"]] == [(1, 2), (1, 3)]
    assert all(group["open"] == [] for group in state["queue"])

    async def resumed() -> None:
        again = schedule(backend := Backend(), async_generation_ratio=2)
        again.load_state(decode(*encode(state)))
        assert places(await again.next_batch(1, version=1)) == [(2, 0), (2, 1), (3, 0), (3, 1)]
        await again.settled(2)
        # Step 1 was there; 2 and 3 are admitted, whole.
        assert {request.order[1] for request in backend.requests} == {4, 5, 6, 7}
        await again.close()

    run_in_ticks(resumed())


def test_a_step_that_was_given_out_is_saved_until_it_is_trained() -> None:
    async def run() -> None:
        scheduler = schedule(Backend(), async_generation_ratio=1)
        await scheduler.next_batch(0, version=0)
        assert {group["step"] for group in scheduler.state(0)["queue"]} >= {0}
        await scheduler.settled(1)
        assert {group["step"] for group in scheduler.state(1)["queue"]} == {1}
        await scheduler.close()

    run_in_ticks(run())


def test_what_fails_while_the_trainer_works_ends_the_wait_for_the_rest() -> None:
    backend = Backend()

    async def answer(request: Request) -> None:
        if request.order == (0, 3, 1, 0, 2):
            raise EngineError("lost")

    backend.answer = answer

    async def run() -> None:
        scheduler = schedule(backend, async_generation_ratio=1)
        await scheduler.next_batch(0, version=0)
        with pytest.raises(EngineError, match="lost"):
            await scheduler.settled(1)
        assert backend.lives[-1] == 0  # nobody is alive
        await scheduler.close()

    run_in_ticks(run())


def test_failed_episodes_ahead_are_tried_again_within_their_step() -> None:
    failed: list[int | None] = []

    class Fails(FakeEnvironment):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if seed == environment_seed(11, "Count", 2) and len(failed) < 2:
                failed.append(seed)
                raise RuntimeError("boom")
            return super().reset(seed=seed, options=options)

    async def run() -> None:
        backend = Versioned([0])
        scheduler = schedule(backend, plan(build=Fails), async_generation_ratio=1, max_steps=3)
        out = await trained(scheduler, backend, 3)
        assert out[1] == [(2, 0), (2, 1), (3, 0), (3, 1)]
        await scheduler.close()

    run_in_ticks(run())
    assert len(failed) == 2


def test_a_queue_of_other_groups_a_step_is_refused() -> None:
    buffer = GroupBuffer([plan(2)], CALM)
    buffer.admit(0)
    for group, member in iter(buffer.start, None):
        buffer.end(group, member, played(group, member))
    written = buffer.snapshot()
    for groups in (1, 3):
        with pytest.raises(CheckpointError, match="num_env_groups"):
            GroupBuffer([plan(groups)], CALM).restore(written)
    GroupBuffer([plan(2)], CALM).restore(written)


def test_seconds_of_work_are_those_in_which_an_episode_is_alive() -> None:
    backend = Backend()

    async def answer(request: Request) -> None:
        await asyncio.sleep(2)

    backend.answer = answer

    async def run() -> None:
        scheduler = schedule(backend)
        await asyncio.sleep(5)
        assert scheduler.worked() == 0
        await scheduler.next_batch(0, version=0)
        await asyncio.sleep(20)
        assert scheduler.worked() == 6  # three turns
        assert scheduler.worked() == 0
        await scheduler.close()

    run_in_ticks(run())


def test_where_nothing_moves_the_run_ends_with_what_waits_for_what() -> None:
    asked: list[Request] = []

    async def answer(request: Request) -> None:
        asked.append(request)
        if len(asked) > 6:
            await asyncio.sleep(1000)

    async def run() -> None:
        scheduler = schedule(Backend(answer), request_timeout=5000, stall_timeout=40)
        with pytest.raises(TurnwiseError) as error:
            await scheduler.next_batch(0, version=0)
        assert (
            "nothing moved for stall_timeout = 40 s while 4 episodes are open (4 wait for the model's answer). "
            in str(error.value)
        )
        assert "Count, group 0, member 0, attempt 0: the model's answer, for 48 s" in str(error.value)
        await scheduler.close()

    run_in_ticks(run())


@pytest.mark.parametrize("slowness", [39, 45])
def test_what_is_slow_but_moves_is_no_stall(slowness: int) -> None:
    async def answer(request: Request) -> None:
        await asyncio.sleep(slowness)

    async def run() -> float:
        # Twelve answers, one after the other: many times the timeout in all.
        scheduler = schedule(Backend(answer), request_timeout=5000, stall_timeout=40, max_concurrent=1)
        try:
            await scheduler.next_batch(0, version=0)
            return asyncio.get_running_loop().time()
        finally:
            await scheduler.close()

    if slowness < 40:
        assert run_in_ticks(run()) == 12 * slowness
    else:
        with pytest.raises(TurnwiseError, match="nothing moved"):
            run_in_ticks(run())
