"""Episodes in workers that are held, recorded, played again and lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

pytest.importorskip("ray", reason="ray is not installed")

import ray

from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.contracts.rollout import EpisodeSpec, Record, RolloutResult, RolloutSettings, WorkerLost
from turnwise.data.exact import decode, encode
from turnwise.errors import EngineError
from turnwise.rollout import Scheduler
from turnwise.testing.fake_model import FakeChat
from turnwise_ray.actors import result
from turnwise_ray.router import Router

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("cluster"), pytest.mark.filterwarnings("ignore")]

TURNS = RolloutSettings(
    seed=3,
    step_timeout=10,
    reset_timeout=10,
    request_timeout=60,
    max_env_failure_rate=0.99,
    max_concurrent=3,
    async_generation_ratio=1,
    weight_update="between_turns",
)
SLOW = {"delay": 0.2}


class Cut:
    """A scheduler over `runtime` that has played step 0; of step 1 some episodes are open, and held. `asked`: how many
    the backend was told may ask it."""

    def __init__(self, runtime: Any, backend: Any, plan: Any, settings: RolloutSettings = TURNS) -> None:
        self.asked: list[int] = []
        live = backend.live
        backend.live = lambda episodes: (self.asked.append(episodes), live(episodes))
        self.backend, self.workers = backend, runtime.workers
        self.executor = runtime.executor([plan], settings, FakeChat(), backend)
        self.scheduler = Scheduler([plan], settings, backend, FakeChat(), self.executor)

    async def held(self) -> dict[str, Any]:
        """The state at the cut, as a checkpoint would hold it."""
        await asyncio.wait_for(self.scheduler.next_batch(0, version=0), 60)
        await asyncio.wait_for(self.scheduler.hold(), 60)
        state: dict[str, Any] = decode(*encode(self.scheduler.state(1)))
        return state

    async def ended(self) -> RolloutResult:
        """Step 1."""
        try:
            return await asyncio.wait_for(self.scheduler.next_batch(1, version=1), 60)
        finally:
            await self.scheduler.close()


def records(state: dict[str, Any]) -> dict[tuple[int, int], list[Any]]:
    """Of each open episode of step 1, its generations."""
    groups = [group for group in state["queue"] if group["step"] == 1]
    return {(group["slot"] + 4, r[0]): r[1] for group in groups for r in group.get("records", ())}


def played(result: RolloutResult) -> list[Any]:
    return [
        (t.group, t.member, t.attempt, [(turn.text, turn.observation, turn.reward) for turn in t.turns])
        for t in result.trajectories
    ]


def test_held_in_every_worker_episodes_ask_for_nothing_and_go_on_with_the_weights_that_came(
    place: Any, prepared: Any, plan: Any
) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime, **SLOW)
        cut = Cut(runtime, backend, plan())
        before = records(await cut.held())
        assert sum(len(generations) for generations in before.values()) > 0
        assert (cut.executor.flying(), cut.asked[-1]) == (0, 0)
        role = runtime._trainer()
        await backend.pause()
        offer = await role.offer("fake", 2, backend.receivers("fake"))
        await asyncio.gather(role.send(offer), backend.receive(offer))
        await backend.resume()
        await cut.scheduler.release()
        assert cut.asked[-1] == 6
        result = await cut.ended()
        assert len(result.trajectories) == 12
        versions = {(t.group, t.member): [set(turn.versions.tolist()) for turn in t.turns] for t in result.trajectories}
        for episode, turns in versions.items():  # what was recorded at the cut is all that the old weights said
            old = len(before.get(episode, ()))
            assert turns == [{1}] * old + [{2}] * (3 - old) or turns == [{1}] * 3, (episode, old, turns)
        assert any(turns[0] == {1} and turns[-1] == {2} for turns in versions.values())

    place(work, env_workers=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_open_episodes_of_workers_go_on_from_their_records(place: Any, prepared: Any, plan: Any, workers: int) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime, **SLOW)
        cut = Cut(runtime, backend, plan())
        state = await cut.held()
        open = records(state)
        assert any(open.values())
        await cut.scheduler.release()
        whole = played(await cut.ended())
        again = Cut(runtime, backend, plan())
        again.scheduler.load_state(state)
        result = await again.ended()
        assert played(result) == whole
        assert (result.counts["attempts"], result.counts["env_failures"]) == (12, 0)
        assert again.scheduler.gauges()["resume/replayed"] == len(open)
        assert again.scheduler.gauges()["resume/restarted"] == 0

    place(work, env_workers=workers)


def test_an_environment_that_does_something_else_starts_anew_in_its_worker(
    place: Any, prepared: Any, plan: Any
) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime, **SLOW)
        cut = Cut(runtime, backend, plan("fickle_env"))
        state = await cut.held()
        await cut.scheduler.close()
        again = Cut(runtime, backend, plan("fickle_env"))
        again.scheduler.load_state(state)
        result = await again.ended()
        assert len(result.trajectories) == 12
        assert again.scheduler.gauges()["resume/restarted"] == len(records(state)) > 0
        assert result.counts["env_failures"] == 0

    place(work, env_workers=1)


def test_a_batch_that_is_given_up_leaves_the_records_of_what_was_open(place: Any, prepared: Any, plan: Any) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime, **SLOW)
        cut = Cut(runtime, backend, plan())
        batch = asyncio.ensure_future(cut.scheduler.next_batch(0, version=0))
        while not sum(len(spec.record.generations) for spec, _ in cut.executor._plays.values()):
            await asyncio.sleep(0.05)
            await cut.executor.records()
        batch.cancel()
        await asyncio.wait([batch])
        state = cut.scheduler.state(0)
        assert sum(len(record[1]) for group in state["queue"] for record in group.get("records", ())) > 0
        await cut.scheduler.close()

    place(work, env_workers=2)


def test_a_worker_that_dies_while_its_episodes_are_held_leaves_the_others_held(
    place: Any, prepared: Any, plan: Any
) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime, **SLOW)
        cut = Cut(runtime, backend, plan())
        await cut.held()
        victim = runtime.workers.all[0]
        ray.kill(victim.actor)
        while not victim.restarts or victim.actor is None or cut.executor._number not in victim.open:
            await asyncio.sleep(0.05)
        assert (cut.executor.flying(), cut.asked[-1]) == (0, 0)
        await cut.scheduler.release()
        result = await cut.ended()
        assert sorted({(t.group, t.member) for t in result.trajectories}) == [
            (group, member) for group in range(4, 8) for member in range(3)
        ]
        assert result.counts["env_failures"] == 1
        assert result.counts["retries"] >= 1

    place(work, env_workers=2)


def test_nobody_waits_for_the_requests_of_a_worker_that_is_gone(place: Any, prepared: Any, plan: Any) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime, delay=600.0)
        executor = runtime.executor([plan()], TURNS, FakeChat(), backend)
        changes: list[int] = []
        executor.listen(lambda: changes.append(executor.flying()))
        specs = [EpisodeSpec("Count", group, 0, 0, seed=group, record=Record()) for group in range(4)]
        tasks = [asyncio.ensure_future(executor.play(spec, lambda error: None)) for spec in specs]
        workers = runtime.workers.all
        while any(executor._number not in worker.open for worker in workers):
            await asyncio.sleep(0.05)
        for worker in workers:  # all are through
            assert await asyncio.wait_for(until(worker.actor, executor._number, 2), 30) == 2
        await executor.hold()
        assert executor.flying() == 4
        for worker in workers:
            ray.kill(worker.actor)
        done, _ = await asyncio.wait(tasks, timeout=30)
        assert {type(task.exception()) for task in done} == {WorkerLost}
        assert (executor.flying(), changes[-1]) == (0, 0)

    place(work, env_workers=2)


async def until(actor: Any, number: int, flying: int) -> int:
    while (now := await result(actor.flying.remote(number, -1))) != flying:
        await asyncio.sleep(0.05)
    return now


def test_no_time_passes_for_the_requests_of_workers_while_the_engine_is_paused(
    place: Any, prepared: Any, plan: Any
) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime, delay=1.0)
        settings = evolve(TURNS, request_timeout=0.3)
        executor = runtime.executor([plan()], settings, FakeChat(), backend)
        stopped: list[Any] = []
        spec = EpisodeSpec("Count", 0, 0, 0, seed=1)
        await executor.freeze()
        played = await asyncio.wait_for(executor.play(spec, stopped.append), 60)
        assert len(played.trajectories[0].turns) == 3
        await executor.release()
        with pytest.raises(EngineError, match=r"request_timeout: 0\.3 s"):
            await asyncio.wait_for(executor.play(evolve(spec), stopped.append), 60)

    place(work, env_workers=1)


def test_an_environment_that_hangs_in_a_worker_counts_as_a_timeout(place: Any, prepared: Any, plan: Any) -> None:
    async def work(runtime: Any) -> None:
        backend = await prepared(runtime)
        settings = evolve(TURNS, async_generation_ratio=0, step_timeout=0.3, max_env_retries=0)
        hanging = evolve(plan(fails="hang", fails_every=2), step="thread")
        executor = runtime.executor([hanging], settings, FakeChat(), backend)
        scheduler = Scheduler([hanging], settings, backend, FakeChat(), executor)
        result = await asyncio.wait_for(scheduler.next_batch(0, version=0), 60)
        await scheduler.close()
        assert result.counts["env_timeouts"] == result.counts["env_failures"] > 0
        assert result.counts["discarded_tokens"] >= result.counts["env_failures"]  # each had its first response

    place(work, env_workers=1)


def test_a_request_that_no_engine_ever_will_answer_leaves_nothing_behind() -> None:
    router = Router("actor_infer", "ids")
    request = Request(seed=1, args=GeneratingArgs(), max_new_tokens=4, order=(0, 0, 0, 0, 0))

    def died(*args: Any) -> Any:
        router.serve({}, "all engines are gone")
        raise ray.exceptions.RayActorError()

    gone = SimpleNamespace(generate=SimpleNamespace(remote=died))

    async def ask() -> None:
        router.serve({0: gone})
        with pytest.raises(EngineError, match="all engines are gone"):
            await router.generate(request)
        assert router.idle

    asyncio.run(ask())
