"""The scheduler: groups, retries, replacement, live counts, errors of the backend, cancellation. Fakes of its own."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from turnwise.contracts.env_manager import Episode, Limits, Sampler
from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.contracts.rollout import EpisodeSpec, Played, RolloutResult, RolloutSettings, TagPlan, WorkerLost
from turnwise.data import Generation, Sample, Trajectory, Turn
from turnwise.errors import CheckpointError, ConfigError, EngineError, EnvironmentFailure, TrainerError, TurnwiseError
from turnwise.rollout import LocalExecutor, Scheduler
from turnwise.rollout.seeds import REPLACEMENT, environment_seed, request_seed

TURNS = 3
LIMITS = Limits(sequence_length=64, max_new_tokens=4, max_tokens_per_step=4, max_turns=TURNS)
CALM = RolloutSettings(seed=11, step_timeout=5, reset_timeout=5, request_timeout=5, max_env_failure_rate=0.99)


class World:
    """Tells its resets to `log`; `behave(world, what)` may raise, sleep, or return a result of its own."""

    def __init__(self, log: list[Any], behave: Callable[[World, str], Any]) -> None:
        self.log, self.behave, self.seed = log, behave, 0
        log.append(("built", id(self)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.seed = seed or 0
        self.log.append(("reset", seed, options))
        return self.behave(self, "reset") or ("start", {})

    def step(self, action: str) -> Any:
        return self.behave(self, "step") or (f"after {action}", 1.0, False, False, {})

    def render(self) -> str:
        return f"frame of {self.seed}"

    def close(self) -> None:
        self.log.append(("closed", id(self)))


class Manager:
    """Plays TURNS turns; a prompt is the turn's number."""

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        await episode.environment.reset()
        turns = []
        for k in range(episode.limits.max_turns):
            ids = np.array([k], np.int32)
            answer = await sampler.generate(turn=k, ids=ids, max_new_tokens=4, actions=("go",))
            assert answer.ids is not None
            _, reward, *_ = await episode.environment.step(answer.text)
            mask, versions = np.ones(len(answer.ids), bool), np.zeros(len(answer.ids), np.int32)
            turns.append(Turn(ids, answer.ids, mask, None, versions, reward, anchor=k))
        return Trajectory(
            episode.tag, episode.group, episode.member, episode.seed, tuple(turns), "turns", attempt=episode.attempt
        )

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        n = len(trajectory.turns)
        return [
            Sample(np.zeros(n, np.int32), np.zeros(n, bool), np.full(n, -1, np.int32), None, np.full(n, -1, np.int32))
        ]


class Backend:
    """Answers with the request's seed as text; remembers requests and live counts in the order in which they came."""

    input = "ids"

    def __init__(self, answer: Callable[[Request], Any] | None = None) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.events: list[Any] = []
        self.aborted: list[Request] = []

    async def generate(self, request: Request) -> Generation:
        self.requests.append(request)
        self.events.append("generate")
        await asyncio.sleep(0)
        if self.answer is not None:
            await self.answer(request)
        return Generation(str(request.seed), np.array([1, 2], np.int32), None, None, "stop")

    def live(self, episodes: int) -> None:
        self.events.append(episodes)

    async def abort(self, request: Request) -> None:
        self.aborted.append(request)


def well(world: World, what: str) -> None:
    return None


def plan(log: list[Any], behave: Callable[[World, str], Any] = well, **options: Any) -> TagPlan:
    merged: dict[str, Any] = {"tag": "Lake", "groups": 2, "group_size": 2, "step": "inline"} | options
    return TagPlan(build=lambda: World(log, behave), manager=Manager(), limits=LIMITS, **merged)


def schedule(plans: list[TagPlan], settings: RolloutSettings, backend: Any) -> Scheduler:
    return Scheduler(plans, settings, backend, None)


def batch(
    plans: list[TagPlan], settings: RolloutSettings = CALM, backend: Any = None, step: int = 0, render: int = 0
) -> RolloutResult:
    async def run() -> RolloutResult:
        scheduler = schedule(plans, settings, backend or Backend())
        try:
            return await (
                scheduler.evaluate(render=render) if settings.evaluation else scheduler.next_batch(step, version=step)
            )
        finally:
            await scheduler.close()
            await scheduler.close()
            await asyncio.sleep(0.01)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return asyncio.run(run())


def places(result: RolloutResult) -> list[tuple[int, int]]:
    return [(t.group, t.member) for t in result.trajectories]


def fails_first(times: int, what: str, fault: Callable[[], Any]) -> Callable[[World, str], Any]:
    """Fail in the first `times` calls of `what`, over all instances."""
    calls: list[str] = []

    def behave(world: World, called: str) -> Any:
        calls.append(called)
        return fault() if called == what and calls.count(what) <= times else None

    return behave


def throw() -> None:
    raise ValueError("boom")


def test_a_batch_holds_every_group_in_order_with_derived_seeds() -> None:
    log: list[Any] = []
    backend = Backend()
    settings = evolve(CALM, generating_args=GeneratingArgs(temperature=0.5))
    result = batch([plan(log), plan(log, tag="Box", groups=1, group_size=3)], settings, backend, step=4)
    assert places(result) == [(12, 0), (12, 1), (13, 0), (13, 1), (14, 0), (14, 1), (14, 2)]
    assert [t.tag for t in result.trajectories] == ["Lake"] * 4 + ["Box"] * 3
    assert [t.seed for t in result.trajectories[:4]] == [environment_seed(11, "Lake", g) for g in (12, 12, 13, 13)]
    assert all(len(rows) == 1 for rows in result.samples)
    by_order = {request.order: request for request in backend.requests}
    assert len(by_order) == len(backend.requests) == 7 * TURNS
    request = by_order[(0, 13, 1, 0, 2)]
    assert request.seed == request_seed(environment_seed(11, "Lake", 13), 1, 0, 2)
    assert (request.tag, request.actions, request.max_new_tokens, request.args.temperature) == ("Lake", ("go",), 4, 0.5)
    assert len({r.seed for r in backend.requests}) == 7 * TURNS
    expected = {
        "episodes": 7,
        "planned_episodes": 7,
        "attempts": 7,
        "turns": 21,
        "sampled_tokens": 42,
        "env_failures": 0,
        "retries": 0,
    }
    assert {name: result.counts[name] for name in expected} == expected
    assert result.failures == []


@pytest.mark.parametrize(
    ("what", "fault", "cause"),
    [
        ("reset", throw, "Lake.reset raised ValueError: boom"),
        ("step", throw, "Lake.step raised ValueError: boom"),
        ("reset", lambda: (7, {}), "returned 7 (int) as the observation"),
        ("step", lambda: ("x", math.nan, False, False, {}), "the reward nan"),
        ("step", lambda: (3.5, 0.0, False, False, {}), "returned 3.5 (float) as the observation"),
        ("step", lambda: "x", "Fix: return (observation, reward, terminated, truncated, info)"),
    ],
)
@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_a_failed_episode_is_counted_and_played_again_with_the_same_seed(
    mode: Any, what: str, fault: Callable[[], Any], cause: str
) -> None:
    log: list[Any] = []
    result = batch([plan(log, fails_first(1, what, fault), groups=1, step=mode)])
    assert places(result) == [(0, 0), (0, 1)]
    assert sorted(t.attempt for t in result.trajectories) == [0, 1]
    assert {entry[1] for entry in log if entry[0] == "reset"} == {environment_seed(11, "Lake", 0)}
    assert sum(entry[0] == "built" for entry in log) == 3  # the failed instance is not used again
    assert (result.counts["env_failures"], result.counts["retries"], result.counts["env_timeouts"]) == (1, 1, 0)
    assert len(result.failures) == 1
    assert result.failures[0].startswith("Lake, group 0, member ")
    assert cause in result.failures[0]


def test_a_retried_episode_has_other_request_seeds() -> None:
    backend = Backend()
    batch([plan([], fails_first(1, "step", throw))], backend=backend)
    seeds = {request.order: request.seed for request in backend.requests}
    retried = next(order for order in seeds if order[3] == 1)
    assert seeds[retried] != seeds[(*retried[:3], 0, retried[4])]


@pytest.mark.parametrize("what", ["reset", "step"])
def test_a_hanging_thread_is_a_counted_timeout_and_the_episode_is_played_again(what: str) -> None:
    settings = evolve(CALM, step_timeout=0.1, reset_timeout=0.1)
    start = time.monotonic()
    result = batch([plan([], fails_first(1, what, lambda: time.sleep(1.0)), groups=1, step="thread")], settings)
    assert time.monotonic() - start < 0.9
    assert len(result.trajectories) == 2
    assert (result.counts["env_timeouts"], result.counts["env_failures"]) == (1, 1)
    assert f"Lake.{what} did not return within 0.1 s" in result.failures[0]


def test_a_member_without_attempts_left_is_dropped_and_its_group_kept_while_two_remain() -> None:
    def run(failures: int) -> RolloutResult:
        left = [failures]

        def behave(world: World, what: str) -> None:
            if what == "step" and world.seed == environment_seed(11, "Lake", 0) and left[0]:
                left[0] -= 1
                throw()

        return batch([plan([], behave, group_size=3)], evolve(CALM, max_env_retries=0, max_concurrent=1))

    kept = run(failures=1)
    assert places(kept) == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert (kept.counts["dropped_members"], kept.counts["replaced_groups"]) == (1, 0)
    replaced = run(failures=2)
    assert places(replaced)[3:] == [(REPLACEMENT, 0), (REPLACEMENT, 1), (REPLACEMENT, 2)]
    assert (
        replaced.counts["dropped_members"],
        replaced.counts["replaced_groups"],
        replaced.counts["discarded_episodes"],
    ) == (2, 1, 1)


def test_a_group_with_one_usable_member_is_replaced_under_its_own_serial_number() -> None:
    lost = environment_seed(11, "Lake", 1)
    result = batch(
        [plan([], lambda world, what: throw() if world.seed == lost and what == "step" else None, groups=3)],
        evolve(CALM, max_env_retries=1),
    )
    assert places(result) == [(0, 0), (0, 1), (2, 0), (2, 1), (1 + REPLACEMENT, 0), (1 + REPLACEMENT, 1)]
    assert result.trajectories[-1].seed == environment_seed(11, "Lake", 1 + REPLACEMENT)
    counts = {
        "replaced_groups": 1,
        "dropped_members": 2,
        "env_failures": 4,
        "retries": 2,
        "episodes": 6,
        "attempts": 10,
    }
    assert {name: result.counts[name] for name in counts} == counts


def test_results_do_not_depend_on_timing() -> None:
    def run(jitter: int) -> tuple[Any, ...]:
        dice = random.Random(jitter)

        async def answer(request: Request) -> None:
            await asyncio.sleep(dice.random() * 0.01)

        def behave(world: World, what: str) -> None:
            time.sleep(dice.random() * 0.003)
            if world.seed == environment_seed(11, "Lake", 2):
                throw()

        backend = Backend(answer)
        result = batch([plan([], behave, groups=4, step="thread")], evolve(CALM, max_concurrent=5), backend)
        texts = sorted((r.order, r.seed) for r in backend.requests)
        return places(result), [t.seed for t in result.trajectories], texts, result.counts, result.failures

    assert run(1) == run(2)


def test_a_run_stops_past_the_failure_rate_and_says_why() -> None:
    settings = evolve(CALM, max_env_failure_rate=0.25)
    assert (
        len(batch([plan([], fails_first(1, "step", throw))], settings).trajectories) == 4
    )  # 1 of 4 is not past a quarter
    with pytest.raises(EnvironmentFailure) as caught:
        batch([plan([], fails_first(2, "step", throw))], settings)
    text = str(caught.value)
    assert "\n" not in text
    assert "2 attempts to play an episode failed in step 0 (Lake: 2; 4 episodes planned" in text
    assert "max_env_failure_rate: 0.25" in text
    assert "Lake.step raised ValueError: boom" in text
    assert "Fix: " in text
    assert isinstance(caught.value.__cause__, EnvironmentFailure)


def test_an_environment_that_always_fails_ends_the_run_even_at_a_high_rate() -> None:
    with pytest.raises(EnvironmentFailure, match="max_env_failure_rate"):
        batch([plan([], lambda world, what: throw())])


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan])
def test_a_failure_rate_that_never_stops_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="max_env_failure_rate"):
        RolloutSettings(seed=0, max_env_failure_rate=rate)


def test_an_exception_of_the_manager_is_a_failed_attempt_but_an_error_of_turnwise_is_not() -> None:
    class Clumsy(Manager):
        left = 1

        def samples(self, trajectory: Trajectory) -> list[Sample]:
            if self.left:
                self.left -= 1
                raise error
            return super().samples(trajectory)

    error: Exception = KeyError("role")
    result = batch([evolve(plan([]), manager=Clumsy())])
    assert len(result.trajectories) == 4
    assert "the environment manager raised KeyError: 'role', at " in result.failures[0]
    assert "test_rollout_scheduler.py:" in result.failures[0]  # where its author looks first
    error = TrainerError("no room")
    with pytest.raises(TrainerError, match="no room"):
        batch([evolve(plan([]), manager=Clumsy())])


@pytest.mark.parametrize(
    ("raised", "text"),
    [(EngineError("lost"), "^lost$"), (RuntimeError("CUDA"), "backend raised RuntimeError: CUDA for turn 1 of Lake")],
)
def test_an_error_of_the_backend_ends_the_batch_and_aborts_every_other_request(raised: Exception, text: str) -> None:
    async def answer(request: Request) -> None:
        if request.order == (0, 0, 1, 0, 1):
            raise raised
        if request.order[-1] == 1:
            await asyncio.sleep(60)

    backend = Backend(answer)
    with pytest.raises(EngineError, match=text):
        batch([plan([])], backend=backend)
    assert sorted(r.order for r in backend.aborted) == [(0, 0, 0, 0, 1), (0, 1, 0, 0, 1), (0, 1, 1, 0, 1)]
    assert backend.events[-1] == 0


def test_a_request_that_is_never_answered_ends_the_batch() -> None:
    async def answer(request: Request) -> None:
        if request.order == (0, 1, 0, 0, 2):
            await asyncio.sleep(60)

    start = time.monotonic()
    with pytest.raises(
        EngineError, match=r"turn 2 of Lake, group 1, member 0, attempt 0 within request_timeout: 0\.1 s"
    ):
        batch([plan([])], evolve(CALM, request_timeout=0.1), Backend(answer))
    assert time.monotonic() - start < 2


def test_a_backend_that_cancels_a_request_ends_the_batch_instead_of_hanging_it() -> None:
    async def answer(request: Request) -> None:
        raise asyncio.CancelledError

    with pytest.raises(EngineError, match="cancelled an episode"):
        batch([plan([])], backend=Backend(answer))


class Odd(BaseException):
    """Neither an Exception nor a cancellation: what `sys.exit` and a test's own failure are, too."""


def ends(plans: list[TagPlan], backend: Backend) -> None:
    """Play a batch that must end, within seconds."""

    async def run() -> None:
        scheduler = schedule(plans, CALM, backend)
        try:
            await asyncio.wait_for(scheduler.next_batch(0, version=0), 5)
        finally:
            await scheduler.close()

    asyncio.run(run())


@pytest.mark.parametrize("error", [Odd("odd"), SystemExit(0), GeneratorExit()])
def test_a_manager_that_ends_its_task_by_no_exception_ends_the_batch_with_the_error(error: BaseException) -> None:
    class Leaves(Manager):
        async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
            if (episode.group, episode.member) == (1, 0):
                raise error
            return await super().run(episode, sampler)

    log: list[Any] = []
    backend = Backend()
    with pytest.raises(
        TurnwiseError, match=rf"^Lake, group 1, member 0: the episode ended by {type(error).__name__}"
    ) as caught:
        ends([evolve(plan(log), manager=Leaves())], backend)
    assert caught.value.__cause__ is error
    assert backend.events[-1] == 0
    if not isinstance(
        error, GeneratorExit
    ):  # what is thrown into a coroutine that is dropped: it may await nothing more
        assert sum(entry[0] == "closed" for entry in log) == 4  # its environment, too


@pytest.mark.parametrize("error", [Odd("odd"), SystemExit(0)])
def test_a_backend_that_raises_no_exception_ends_the_batch_with_the_error(error: BaseException) -> None:
    async def answer(request: Request) -> None:
        if request.order == (0, 0, 1, 0, 1):
            raise error

    with pytest.raises(
        EngineError, match=rf"backend raised {type(error).__name__}: .* for turn 1 of Lake, group 0, member 1"
    ) as caught:
        ends([plan([])], Backend(answer))
    assert caught.value.__cause__ is error


def test_an_episode_whose_task_is_cancelled_before_it_begins_ends_the_batch() -> None:
    async def run() -> None:
        scheduler = schedule([plan([])], CALM, Backend())
        playing = asyncio.ensure_future(scheduler.next_batch(0, version=0))
        asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in asyncio.all_tasks() - {me, playing}])
        with pytest.raises(EngineError, match="cancelled an episode"):
            await asyncio.wait_for(playing, 5)
        await scheduler.close()

    async def main() -> None:
        nonlocal me
        me = asyncio.current_task()
        await run()

    me: asyncio.Task[Any] | None = None
    asyncio.run(main())


def test_the_backend_knows_how_many_are_alive_before_the_first_request() -> None:
    backend = Backend()
    batch([plan([], groups=3)], backend=backend)
    counts = [event for event in backend.events if event != "generate"]
    assert backend.events[:2] == [6, "generate"]
    assert counts == [6, 5, 4, 3, 2, 1, 0]


def test_max_concurrent_bounds_the_living_and_their_number_does_not_waver() -> None:
    backend = Backend()
    log: list[Any] = []
    result = batch([plan(log, groups=3)], evolve(CALM, max_concurrent=4), backend)
    assert len(result.trajectories) == 6
    assert [event for event in backend.events if event != "generate"] == [4, 3, 2, 1, 0]
    assert sum(entry[0] == "built" for entry in log) == 4
    assert sum(entry[0] == "closed" for entry in log) == 4


def test_a_replacement_enters_in_the_same_change_of_the_number_alive() -> None:
    backend = Backend()
    batch([plan([], fails_first(2, "reset", throw))], evolve(CALM, max_env_retries=0), backend)
    assert [event for event in backend.events if event != "generate"] == [4, 3, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_max_concurrent_steps_bounds_the_calls_of_a_tag(mode: Any) -> None:
    inside, most = [0], [0]
    lock = threading.Lock()

    def behave(world: World, what: str) -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.002)
        with lock:
            inside[0] -= 1

    batch([plan([], behave, groups=4, step=mode, max_concurrent_steps=2)])
    assert most[0] == (2 if mode == "thread" else 1)


def test_cancelling_a_batch_leaves_no_task_and_no_thread_that_waits() -> None:
    async def answer(request: Request) -> None:
        if request.order[2] == 0:
            await asyncio.sleep(60)

    backend = Backend(answer)
    log: list[Any] = []
    slow = plan(log, lambda world, what: time.sleep(0.3) if what == "step" else None, step="thread")

    async def run() -> None:
        scheduler = schedule([slow], CALM, backend)
        playing = asyncio.ensure_future(scheduler.next_batch(0, version=0))
        await asyncio.sleep(0.1)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len(backend.aborted) == 2
        await scheduler.close()

    asyncio.run(run())
    assert backend.events[-1] == 0
    end = time.monotonic() + 3
    while any(thread.name == "environment Lake" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert sum(entry[0] == "closed" for entry in log) == 4


def test_environments_are_reused_from_batch_to_batch() -> None:
    log: list[Any] = []

    async def run() -> None:
        scheduler = schedule([plan(log)], CALM, Backend())
        for step in range(3):
            assert places(await scheduler.next_batch(step, version=step)) == [
                (2 * step + g, m) for g in (0, 1) for m in (0, 1)
            ]
        await scheduler.close()

    asyncio.run(run())
    assert sum(entry[0] == "built" for entry in log) == 4


def rows_of(log: list[Any]) -> list[int]:
    return [entry[2]["index"] for entry in log if entry[0] == "reset"]


def test_training_walks_a_permutation_of_the_data_set_and_groups_share_a_row() -> None:
    log: list[Any] = []
    for step in range(4):
        batch([plan([], tag="Other", groups=1), plan(log, groups=3, num_tasks=6)], step=step)
    rows = rows_of(log)
    assert rows[0::2] == rows[1::2]
    assert sorted(rows[0:12:2]) == sorted(rows[12:24:2]) == list(range(6))
    assert rows[0:12] != rows[12:24]


def test_evaluation_plays_the_same_tasks_every_time_and_replaces_nothing() -> None:
    settings = evolve(CALM, evaluation=True)
    lost = environment_seed(11, "Lake", 1, evaluation=True)

    def behave(world: World, what: str) -> None:
        if world.seed == lost:
            throw()

    log: list[Any] = []
    backend = Backend()
    first = batch([plan(log, behave, groups=3, group_size=1, num_tasks=10)], settings, backend)
    assert places(first) == [(0, 0), (2, 0)]
    assert sorted(set(rows_of(log))) == [0, 1, 2]
    assert first.samples == [[], []]
    counts = {"env_failures": 3, "dropped_members": 1, "replaced_groups": 0, "episodes": 2}
    assert {name: first.counts[name] for name in counts} == counts
    assert len(first.failures) == 3
    assert all(request.order[0] == 1 for request in backend.requests)
    again = batch([plan([], behave, groups=3, group_size=1, num_tasks=10)], settings)
    assert [t.seed for t in again.trajectories] == [t.seed for t in first.trajectories]
    assert environment_seed(11, "Lake", 0) not in [t.seed for t in first.trajectories]


def test_frames_of_the_first_episodes_of_each_tag() -> None:
    plans = [plan([]), plan([], tag="Box", step="thread")]
    result = batch(plans, evolve(CALM, evaluation=True), render=3)
    assert sorted(result.frames) == [
        ("Box", 2, 0),
        ("Box", 2, 1),
        ("Box", 3, 0),
        ("Lake", 0, 0),
        ("Lake", 0, 1),
        ("Lake", 1, 0),
    ]
    seed = environment_seed(11, "Lake", 0, evaluation=True)
    assert result.frames[("Lake", 0, 0)] == [f"frame of {seed}"] * (1 + TURNS)


def test_an_environment_that_cannot_render_is_played_without_frames(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(World, "render", lambda self: throw())
    result = batch([plan([])], evolve(CALM, evaluation=True), render=1)
    assert (len(result.trajectories), result.frames, result.failures) == (4, {}, [])
    assert "Lake.render raised ValueError: boom" in caplog.text


def test_asynchronous_steps_are_started_ahead_as_far_as_the_version_allows() -> None:
    backend = Backend()

    async def run() -> None:
        scheduler = schedule([plan([])], evolve(CALM, async_generation_ratio=1), backend)
        assert places(await scheduler.next_batch(0, version=0)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        await asyncio.sleep(0.05)
        assert {r.order[1] for r in backend.requests} == {0, 1, 2, 3}  # step 1 went on playing, step 2 did not start
        assert places(await scheduler.next_batch(1, version=1)) == [(2, 0), (2, 1), (3, 0), (3, 1)]
        await scheduler.close()

    asyncio.run(run())


def test_the_state_between_synchronous_batches_is_an_empty_queue() -> None:
    scheduler = schedule([plan([])], CALM, Backend())
    assert scheduler.state() == {"queue": []}
    scheduler.load_state(scheduler.state())
    for state in ({"queue": [1]}, {"queue": None}, {}):
        with pytest.raises(CheckpointError, match="queue of groups"):
            scheduler.load_state(state)


def test_nothing_past_max_steps_is_started() -> None:
    backend = Backend()

    async def run() -> None:
        scheduler = schedule([plan([])], evolve(CALM, async_generation_ratio=2, max_steps=2), backend)
        for step in range(2):
            await scheduler.next_batch(step, version=step)
            await asyncio.sleep(0.05)
        await scheduler.close()

    asyncio.run(run())
    assert {r.order[1] for r in backend.requests} == {0, 1, 2, 3}


def test_a_replacement_is_played_before_what_belongs_to_later_steps() -> None:
    log: list[Any] = []
    settings = evolve(CALM, async_generation_ratio=1, max_concurrent=1, max_env_retries=0)

    async def run() -> None:
        scheduler = schedule([plan(log, fails_first(2, "reset", throw))], settings, Backend())
        await scheduler.next_batch(0, version=0)
        await scheduler.next_batch(1, version=0)
        await scheduler.close()

    asyncio.run(run())
    seeds = [entry[1] for entry in log if entry[0] == "reset"]
    assert seeds == [
        environment_seed(11, "Lake", group) for group in (0, 0, REPLACEMENT, REPLACEMENT, 1, 1, 2, 2, 3, 3)
    ]


def test_two_schedulers_of_a_backend_report_one_sum() -> None:
    """Training that plays ahead, and an evaluation meanwhile."""
    backend = Backend()
    freed = asyncio.Event()

    async def answer(request: Request) -> None:
        if request.order[:2] in ((0, 2), (0, 3)):  # the groups of step 1
            await freed.wait()

    backend.answer = answer

    async def run() -> None:
        training = schedule([plan([])], evolve(CALM, async_generation_ratio=1), backend)
        evaluation = schedule([plan([], groups=3, group_size=1)], evolve(CALM, evaluation=True), backend)
        await training.next_batch(0, version=0)
        before = len(backend.events)
        await evaluation.evaluate()
        assert [event for event in backend.events[before:] if event != "generate"] == [7, 6, 5, 4]
        freed.set()
        await training.next_batch(1, version=0)
        assert backend.events[-1] == 0
        await evaluation.evaluate()
        await training.close()
        await evaluation.close()

    asyncio.run(run())
    assert [event for event in backend.events if event != "generate"][-4:] == [3, 2, 1, 0]


def test_a_failure_of_what_plays_ahead_lowers_the_number_alive_and_ends_the_next_batch() -> None:
    backend = Backend()

    async def answer(request: Request) -> None:
        if request.order == (0, 2, 0, 0, 0):
            await asyncio.sleep(0.05)
            raise EngineError("lost")
        if request.order[1] in (2, 3):
            await asyncio.sleep(60)

    backend.answer = answer

    async def run() -> None:
        scheduler = schedule([plan([])], evolve(CALM, async_generation_ratio=1), backend)
        await scheduler.next_batch(0, version=0)
        await asyncio.sleep(0.2)
        assert backend.events[-1] == 3
        with pytest.raises(EngineError, match="lost"):
            await scheduler.next_batch(1, version=1)
        assert backend.events[-1] == 0
        assert not any(request.order[1] > 3 for request in backend.requests)
        await scheduler.close()

    asyncio.run(run())


class Elsewhere:
    """An executor that hands every episode to one that plays here, and remembers the attempts; `lose` of them get lost
    with their worker."""

    workers = 3

    def __init__(self, inner: LocalExecutor, lose: int = 0) -> None:
        self.inner, self.lose = inner, lose
        self.specs: list[EpisodeSpec] = []
        self.alive = self.most = self.closed = 0

    async def play(self, spec: EpisodeSpec, stop: Callable[[TurnwiseError], None]) -> Played:
        self.specs.append(spec)
        number = len(self.specs)
        self.alive += 1
        self.most = max(self.most, self.alive)
        try:
            await asyncio.sleep(0)
            if number <= self.lose:
                raise WorkerLost("worker 0 died", counts=number == 1)
            return await self.inner.play(spec, stop)
        finally:
            self.alive -= 1

    def moved(self) -> int:
        return self.inner.moved()

    def waits(self) -> list[str]:
        return self.inner.waits()

    def listen(self, changed: Callable[[], None]) -> None:
        self.inner.listen(changed)

    async def hold(self) -> None:
        await self.inner.hold()

    def flying(self) -> int:
        return self.inner.flying()

    async def freeze(self) -> None:
        await self.inner.freeze()

    async def release(self) -> None:
        await self.inner.release()

    async def records(self) -> None:
        await self.inner.records()

    def stranded(self) -> bool:
        return self.inner.stranded()

    async def abort(self) -> None:
        await self.inner.abort()

    async def close(self) -> None:
        self.closed += 1
        await self.inner.close()


def elsewhere(settings: RolloutSettings, lose: int = 0, groups: int = 2) -> tuple[RolloutResult, Elsewhere]:
    async def run() -> tuple[RolloutResult, Elsewhere]:
        plans, backend = [plan([], groups=groups)], Backend()
        executor = Elsewhere(LocalExecutor(plans, settings, backend, None), lose)  # type: ignore[arg-type]
        scheduler = Scheduler(plans, settings, backend, None, executor)  # type: ignore[arg-type]
        try:
            return await scheduler.next_batch(0, version=0), executor
        finally:
            await scheduler.close()

    return asyncio.run(run())


def test_episodes_played_on_another_stage_are_the_same_ones() -> None:
    there, executor = elsewhere(CALM)
    here = batch([plan([])])
    assert [(t.group, t.member, t.seed) for t in there.trajectories] == [
        (t.group, t.member, t.seed) for t in here.trajectories
    ]
    assert there.counts == here.counts
    assert {(s.tag, s.group, s.member, s.attempt) for s in executor.specs} == {
        ("Lake", g, m, 0) for g in (0, 1) for m in (0, 1)
    }
    assert {s.seed for s in executor.specs} == {environment_seed(CALM.seed, "Lake", g) for g in (0, 1)}
    assert executor.closed == 1


def test_max_concurrent_is_that_of_one_worker() -> None:
    _, executor = elsewhere(evolve(CALM, max_concurrent=1), groups=5)
    assert executor.most == 3


def test_a_lost_worker_is_one_failure_however_many_episodes_it_played() -> None:
    result, executor = elsewhere(evolve(CALM, max_env_failure_rate=0.3), lose=3)
    assert result.counts["env_failures"] == 1
    assert result.counts["retries"] == 3
    assert result.counts["episodes"] == 4
    assert len(result.failures) == 3
    assert sorted(s.attempt for s in executor.specs) == [0, 0, 0, 0, 1, 1, 1]
