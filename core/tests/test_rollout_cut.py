"""Weights that come, and checkpoints that are written, while episodes are open: gates, records, replays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from attrs import evolve

from turnwise.contracts.env_manager import Episode, Limits, ManagerContext, Sampler
from turnwise.contracts.inference import Request
from turnwise.contracts.rollout import RolloutResult, RolloutSettings, TagPlan
from turnwise.data import Generation
from turnwise.data.exact import decode, encode
from turnwise.errors import EngineError, PluginError
from turnwise.rollout import Scheduler
from turnwise.rollout.gate import Gate
from turnwise.testing.compare import says
from turnwise.testing.fakes import FakeChat, FakeEnvironment, FakeEnvManager
from turnwise.testing.ticks import run_in_ticks

LIMITS = Limits(sequence_length=64, max_new_tokens=4, max_tokens_per_step=4, max_turns=3)
TURNS = RolloutSettings(
    seed=11,
    step_timeout=5,
    reset_timeout=5,
    request_timeout=5,
    max_env_failure_rate=0.99,
    async_generation_ratio=1,
    weight_update="between_turns",
)


class Batching:
    """Answers when as many requests wait as episodes may ask, as hf does; stamps `version`."""

    input = "ids"

    def __init__(self) -> None:
        self.version, self.may_ask = 0, 0
        self.waiting: list[asyncio.Future[None]] = []
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        self.start()
        await future
        ids = np.array([97 + request.seed % 4, 98], np.int32)
        return Generation(
            FakeChat().decode(ids), ids, np.zeros(2, np.float32), np.full(2, self.version, np.int32), "stop"
        )

    def live(self, episodes: int) -> None:
        self.may_ask = episodes
        self.start()

    def start(self) -> None:
        if self.waiting and len(self.waiting) >= self.may_ask:
            ready, self.waiting = self.waiting, []
            for future in ready:
                if not future.done():
                    future.set_result(None)

    async def abort(self, request: Request) -> None:
        pass


def plan(build: Callable[[], Any] = FakeEnvironment, **options: Any) -> TagPlan:
    manager = FakeEnvManager(None, ManagerContext(tag="Count", max_turns=3))
    more: dict[str, Any] = {"groups": 2, "group_size": 2, "step": "inline"} | options
    return TagPlan("Count", build, manager, LIMITS, **more)


def schedule(backend: Any, *plans: TagPlan, settings: RolloutSettings = TURNS) -> Scheduler:
    return Scheduler(plans or (plan(),), settings, backend, FakeChat())


def played(result: RolloutResult) -> list[Any]:
    return [
        (t.group, t.member, t.attempt, [(turn.text, turn.observation, turn.reward) for turn in t.turns])
        for t in result.trajectories
    ]


def test_a_closed_gate_holds_what_comes_and_lets_end_what_is_through() -> None:
    seen: list[str] = []

    async def request(gate: Gate, name: str, ends: asyncio.Event) -> None:
        async with gate.through():
            seen.append(name)
            await ends.wait()

    async def run() -> None:
        gate, ends = Gate(), asyncio.Event()
        changes: list[int] = []
        gate.changed = lambda: changes.append(gate.flying)
        first = asyncio.ensure_future(request(gate, "first", ends))
        await asyncio.sleep(0)
        gate.close()
        second = asyncio.ensure_future(request(gate, "second", ends))
        await asyncio.sleep(0.01)
        assert (seen, gate.flying, gate.closed) == (["first"], 1, True)
        ends.set()
        await first
        assert changes == [1, 0]
        gate.open()
        await second
        assert seen == ["first", "second"]

    run_in_ticks(run())


def test_a_backend_that_waits_for_all_does_not_wait_for_those_that_are_held() -> None:
    backend = Batching()

    class Slow(FakeEnvironment):
        async def step(self, action: str) -> Any:  # type: ignore[override]
            await asyncio.sleep(self._seed % 5)
            return super().step(action)

    async def run() -> None:
        scheduler = schedule(backend, plan(Slow))
        await scheduler.next_batch(0, version=0)
        for version in range(1, 4):
            await scheduler.settled(version)
            gate = scheduler.executor.gate  # type: ignore[attr-defined]
            assert (gate.closed, gate.flying, backend.waiting, backend.may_ask) == (True, 0, [], 0)
            before = len(backend.requests)
            await asyncio.sleep(30)
            assert len(backend.requests) == before  # nobody asks
            backend.version = version
            await scheduler.release()
            result = await scheduler.next_batch(version, version=version)
            versions = [v for t in result.trajectories for turn in t.turns for v in turn.versions.tolist()]
            assert all(version - v <= 1 for v in versions)
        await scheduler.close()

    run_in_ticks(run())


def test_an_evaluation_has_the_backend_for_itself_while_training_is_held() -> None:
    backend = Batching()

    async def run() -> None:
        training = schedule(backend)
        evaluation = schedule(backend, plan(groups=3, group_size=1), settings=evolve(TURNS, evaluation=True))
        await training.next_batch(0, version=0)
        await training.hold()
        before = len(backend.requests)
        await evaluation.evaluate()
        assert {request.order[0] for request in backend.requests[before:]} == {1}
        await training.release()
        await training.next_batch(1, version=1)
        await training.close()
        await evaluation.close()

    run_in_ticks(run())


def test_no_time_passes_for_requests_of_a_paused_engine() -> None:
    backend = Batching()
    settings = evolve(TURNS, weight_update="between_tokens", request_timeout=20)

    async def run() -> None:
        scheduler = schedule(backend, settings=settings)
        await scheduler.next_batch(0, version=0)
        backend.may_ask = 99  # it answers nothing
        await scheduler.settled(1)
        await asyncio.sleep(60)
        await scheduler.release()
        backend.live(0)
        await scheduler.next_batch(1, version=1)
        backend.may_ask = 99
        await scheduler.release()
        backend.live = lambda episodes: None  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="request_timeout"):
            await scheduler.next_batch(2, version=2)
        await scheduler.close()

    run_in_ticks(run())


class Unlike(FakeEnvironment):
    """Does not do again what it did."""

    built = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        Unlike.built += 1
        observation, info = super().reset(seed=seed, options=options)
        return f"{observation} of {Unlike.built}", info


async def cut(build: Callable[[], Any], **options: Any) -> tuple[Any, list[Any], set[Any]]:
    """The state at a cut after the first turns of step 1, what the whole run made of that step, and what was sampled of it."""
    backend = Batching()
    gone = asyncio.Event()

    async def generate(request: Request) -> Generation:
        if request.order[1] in (2, 3) and request.order[-1] > 0:
            await gone.wait()
        return await Batching.generate(backend, request)

    backend.generate = generate  # type: ignore[method-assign]
    scheduler = schedule(backend, plan(build, **options))
    backend.live = lambda episodes: None  # type: ignore[method-assign]
    await scheduler.next_batch(0, version=0)
    state, asked = scheduler.state(1), -1
    # Until each of the four has its first turn behind it: an answer is recorded a moment after it was given.
    while sum(len(group.get("records", ())) for group in state["queue"]) < 4 or asked != len(backend.requests):
        asked = len(backend.requests)
        await asyncio.sleep(0.05)
        state = scheduler.state(1)
    state = decode(*encode(state))
    sampled = {request.order for request in backend.requests if request.order[1] in (2, 3)}
    gone.set()
    whole = played(await scheduler.next_batch(1, version=1))
    await scheduler.close()
    return state, whole, sampled


def test_an_open_episode_goes_on_from_its_record_and_nothing_is_sampled_twice() -> None:
    async def run() -> None:
        state, whole, sampled = await cut(FakeEnvironment)
        records = [record for group in state["queue"] for record in group.get("records", ())]
        assert records
        backend = Batching()
        backend.live = lambda episodes: None  # type: ignore[method-assign]
        again = schedule(backend)
        again.load_state(state)
        result = await again.next_batch(1, version=1)
        assert played(result) == whole
        assert result.counts["attempts"] == 4
        assert result.counts["env_failures"] == 0
        assert not {request.order for request in backend.requests if request.order[1] in (2, 3)} & sampled
        assert again.gauges()["resume/replayed"] == len(records)
        assert again.gauges()["resume/restarted"] == 0
        await again.close()

    run_in_ticks(run())


@pytest.mark.parametrize(("build", "replayable"), [(Unlike, True), (FakeEnvironment, False)])
def test_an_episode_that_cannot_be_replayed_starts_anew_as_the_next_attempt(
    build: Any, replayable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        state, _, _ = await cut(build, replayable=replayable)
        records = [record for group in state["queue"] for record in group.get("records", ())]
        backend = Batching()
        backend.live = lambda episodes: None  # type: ignore[method-assign]
        again = schedule(backend, plan(build, replayable=replayable))
        again.load_state(state)
        result = await again.next_batch(1, version=1)
        assert [(t.group, t.member) for t in result.trajectories] == [(2, 0), (2, 1), (3, 0), (3, 1)]
        assert sum(t.attempt for t in result.trajectories) == len(records) > 0
        assert again.gauges()["resume/restarted"] == len(records)
        assert again.gauges()["resume/replayed"] == 0
        assert result.counts["env_failures"] == 0  # it is no fault of the environment
        kept = sum(len(one["ids"]) for _, generations, _ in records for _, one in generations)
        assert result.counts["discarded_tokens"] == kept > 0
        await again.close()
        # One line for all of them; and none where the environment says itself that it cannot.
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == replayable
        for line in told:
            says(line, f"{len(records)} open episodes", "start anew", "group 2, member 0 of Count: ", "something else")

    run_in_ticks(run())


class FailsOnce(FakeEnvironment):
    """Raises at the first reset with each of `seeds`."""

    seeds: ClassVar[set[int]] = set()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed in FailsOnce.seeds:
            FailsOnce.seeds.remove(seed)
            raise RuntimeError("not yet")
        return super().reset(seed=seed, options=options)


def test_an_episode_that_starts_anew_has_all_its_retries() -> None:
    async def run() -> None:
        state, _, _ = await cut(FailsOnce, replayable=False)
        backend = Batching()
        backend.live = lambda episodes: None  # type: ignore[method-assign]
        patient = evolve(TURNS, max_env_retries=1)
        again = schedule(backend, plan(FailsOnce, replayable=False), settings=patient)
        again.load_state(state)
        FailsOnce.seeds = {group["identity"][-1] for group in state["queue"] if group["step"] == 1}
        result = await again.next_batch(1, version=1)
        assert result.counts["env_failures"] == 2
        assert (result.counts["dropped_members"], result.counts["episodes"]) == (0, 4)
        await again.close()

    run_in_ticks(run())


def test_a_turn_that_is_asked_for_twice_is_refused_where_episodes_are_recorded() -> None:
    class Twice(FakeEnvManager):
        async def run(self, episode: Episode, sampler: Sampler) -> Any:
            ids = np.array([1], np.int32)
            await sampler.generate(turn=0, ids=ids, max_new_tokens=2)
            await sampler.generate(turn=0, ids=ids, max_new_tokens=2)
            raise AssertionError("the second call was answered")

    async def run() -> None:
        backend = Batching()
        backend.live = lambda episodes: None  # type: ignore[method-assign]
        twice = evolve(plan(FakeEnvironment), manager=Twice(None, ManagerContext("Toy", 3)))
        scheduler = schedule(backend, twice)
        with pytest.raises(PluginError, match=r"asked twice for turn 0.*Fix: number"):
            await scheduler.next_batch(0, version=0)
        await scheduler.close()

    run_in_ticks(run())
