"""The scheduler: groups in order, their seeds and tasks, how many are alive, evaluations and frames."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest
from attrs import evolve
from worlds import CALM, TURNS, Backend, World, batch, fails_first, places, plan, schedule, throw

from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.rollout.seeds import environment_seed, request_seed


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
