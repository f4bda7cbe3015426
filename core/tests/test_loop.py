"""The order of the work: what the loop calls, on rooms that only note it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.config import load
from turnwise.contracts.rollout import RolloutResult
from turnwise.errors import EngineError, Interrupted, TrainerError
from turnwise.pipeline.clock import Clock
from turnwise.pipeline.guards import Guard, Stopped
from turnwise.pipeline.learner import Learnt, Lesson
from turnwise.pipeline.loop import Loop
from turnwise.pipeline.progress import Progress

Toy = Callable[..., Path]


class Rooms:
    """All rooms in one: every call is noted in `seen`. `stop_at`: the call that asks for a stop; `fails`: calls that
    raise."""

    def __init__(self, every: int, fails: dict[str, Exception] | None = None, stop_at: str = "") -> None:
        self.seen: list[str] = []
        self.every, self.fails, self.stop_at = every, fails or {}, stop_at
        self.stop = asyncio.Event()
        self.progress = Progress()
        self.ahead: dict[str, float] = {}

    def note(self, what: str) -> None:
        self.seen.append(what)
        if what == self.stop_at:
            self.stop.set()
        if what in self.fails:
            raise self.fails[what]

    # RolloutSource
    async def next(self, step: int, version: int) -> RolloutResult:
        self.note(f"next {step}, version {version}")
        await asyncio.sleep(0)
        return RolloutResult([], [], {}, {}, [])

    async def settled(self, version: int) -> None:
        self.note(f"settled {version}")

    async def hold(self) -> None:
        self.note("hold")

    async def release(self) -> None:
        self.note("release")

    def worked(self) -> float:
        return 2.0

    def gauges(self) -> dict[str, float]:
        return self.ahead

    # Learner
    changing = False

    async def prepare(self, step: int, played: RolloutResult) -> Lesson:
        self.note(f"prepare {step}")
        return Lesson(step, None, [], {"tokens/total": 6.0, "tokens/sampled": 4.0})  # type: ignore[arg-type]

    async def learn(self, lesson: Lesson) -> Learnt:
        self.note(f"learn {lesson.step}")
        return Learnt({"policy/loss": float(lesson.step)}, [0.5])

    # Colocation, WeightSync
    async def sleep(self) -> None:
        self.note("sampler off")

    async def publish(self, version: int) -> None:
        self.note(f"publish {version}")

    # Evaluation, Saving
    def due(self, step: int) -> bool:
        return step % self.every == 0

    due_at_end = True

    async def play(self, step: int) -> dict[str, float]:
        self.note(f"evaluate {step}")
        return {"val/score/mean": 1.0}

    async def save(self, done: int) -> None:
        if self.progress.saved_step != done:
            self.note(f"save {done}")
            self.progress.saved, self.progress.saved_step = Path(f"checkpoint-{done}"), done

    async def rescue(self, done: int, error: Exception) -> None:
        self.note(f"rescue {done}")

    # Tracking
    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.note(f"log {step}")

    def unnoted(self, *args: Any) -> None:
        pass

    failures = trajectories = artifact = unnoted


def loop(toy: Toy, rooms: Rooms, **changes: Any) -> Loop:
    config = load(toy(**changes)).config
    (Path(config.output_dir)).mkdir(exist_ok=True)
    # A checkpoint is due after every odd number of steps, an evaluation before every even one.
    saving = SimpleNamespace(
        due=lambda done: done < config.max_steps and done % 2 == 1, save=rooms.save, rescue=rooms.rescue
    )
    room: Any = rooms
    return Loop(
        config=config, rollouts=room, learner=room, weights=room, evaluation=room, saving=saving, colocation=room,  # type: ignore[arg-type]
        tracking=room, guard=Guard(rooms.stop, []), clock=Clock(), progress=rooms.progress,
    )  # fmt: skip


STEP = "next {0}, version {0}|prepare {0}|sampler off|learn {0}|settled {1}|publish {1}|release|log {0}"


def step(number: int) -> list[str]:
    return STEP.format(number, number + 1).split("|")


def evaluated(number: int) -> list[str]:
    return ["hold", f"evaluate {number}", "release"]


def test_a_run_evaluates_plays_learns_publishes_logs_and_saves_in_this_order(toy: Toy) -> None:
    rooms = Rooms(every=2)
    outcome = asyncio.run(loop(toy, rooms).run(0))
    assert rooms.seen == [
        *evaluated(0), *step(0), "save 1",
        *step(1),
        *evaluated(2), *step(2),
        "save 3", *evaluated(3), "log 3",
    ]  # fmt: skip
    assert outcome.checkpoint == Path("checkpoint-3")
    assert outcome.metrics["policy/loss"] == 2.0
    assert outcome.metrics["val/score/mean"] == 1.0
    assert {"time/step", "time/rollout", "time/sync", "tps/rollout"} <= outcome.metrics.keys()
    assert rooms.progress.history.rates == {0: [1, 0.5, 0.5], 1: [1, 0.5, 0.5], 2: [1, 0.5, 0.5]}


def test_a_resumed_run_begins_at_its_first_step(toy: Toy) -> None:
    rooms = Rooms(every=2)
    asyncio.run(loop(toy, rooms).run(1))
    assert rooms.seen[: len(step(1))] == step(1)


def test_a_run_resumed_after_its_last_step_reports_and_saves_nothing(toy: Toy) -> None:
    rooms = Rooms(every=2)
    asyncio.run(loop(toy, rooms).run(3))
    assert rooms.seen == [*evaluated(3), "log 3"]


@pytest.mark.parametrize(
    ("asked", "seen", "done"),
    [
        (
            "next 1, version 1",
            [*step(0), "save 1", "next 1, version 1"],
            1,
        ),  # the rollout is given up, and step 1 is saved already
        ("learn 1", [*step(0), "save 1", *step(1), "save 2"], 2),  # what changes weights is done to its end
        (
            "learn 2",
            [*step(0), "save 1", *step(1), *step(2), "save 3", *evaluated(3), "log 3"],
            3,
        ),  # nothing is left to stop
    ],
)
def test_a_stop_ends_the_run_where_everything_done_is_saved(toy: Toy, asked: str, seen: list[str], done: int) -> None:
    rooms = Rooms(every=100, stop_at=asked)
    run = loop(toy, rooms, eval_steps=100).run(0)
    if done == 3:
        asyncio.run(run)
    else:
        with pytest.raises(Interrupted, match=rf"^stopped after {done} of 3 steps; saved checkpoint-{done}$"):
            asyncio.run(run)
    assert rooms.seen == [*evaluated(0), *seen]


def test_an_evaluation_that_is_stopped_saves_the_steps_before_it(toy: Toy) -> None:
    rooms = Rooms(every=2, fails={"evaluate 2": Stopped()})
    with pytest.raises(Interrupted, match="stopped after 2 of 3 steps; saved checkpoint-2"):
        asyncio.run(loop(toy, rooms).run(0))
    assert rooms.seen[-2:] == ["evaluate 2", "save 2"]


@pytest.mark.parametrize(
    ("call", "error"), [("next 1, version 1", EngineError("gone")), ("learn 1", TrainerError("out of chalk"))]
)
def test_a_failure_ends_the_run_with_nothing_more_called_where_all_is_saved_or_weights_are_of_no_version(
    toy: Toy, call: str, error: Exception
) -> None:
    rooms = Rooms(every=100, fails={call: error})
    rooms.changing = call.startswith("learn")
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(loop(toy, rooms).run(0))
    assert rooms.seen[-1] == call if rooms.changing else [call, "rescue 1"] == rooms.seen[-2:]
    assert rooms.progress.saved_step == 1


@pytest.mark.parametrize(
    ("call", "then"),
    [
        ("next 2, version 2", ["rescue 2"]),
        ("prepare 2", ["rescue 2"]),
        ("settled 2", ["log 1", "rescue 2"]),
        ("publish 2", ["log 1", "rescue 2"]),
        ("next 0, version 0", []),
        ("learn 0", []),
        ("publish 1", ["log 0", "rescue 1"]),
    ],
)
def test_a_failure_leaves_a_checkpoint_of_the_newest_whole_weights_and_their_metrics(
    toy: Toy, call: str, then: list[str]
) -> None:
    rooms = Rooms(every=100, fails={call: EngineError("gone")})
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(loop(toy, rooms).run(0))
    assert rooms.seen[rooms.seen.index(call) + 1 :] == then


def test_throughput_counts_every_epoch_and_the_seconds_of_the_phase(toy: Toy) -> None:
    rooms = Rooms(every=100)
    run = loop(toy, rooms, ppo_epochs=2, max_steps=1)

    async def learn(lesson: Lesson) -> Learnt:
        with run.clock.phase("actor_train"):
            await asyncio.sleep(0.05)
        return Learnt({"policy/loss": 0.0}, [])

    rooms.learn = learn  # type: ignore[method-assign]
    outcome = asyncio.run(run.run(0))
    assert outcome.metrics["tps/actor_train"] == pytest.approx(6.0 * 2 / outcome.metrics["time/actor_train"])
    assert outcome.metrics["time/actor_train"] >= 0.05
    assert outcome.metrics["tps/rollout"] == 4.0 / 2.0  # the sampler's seconds, not those in which the trainer waited


def test_what_plays_ahead_tells_its_groups_and_who_waits_for_whom(toy: Toy) -> None:
    rooms = Rooms(every=100)
    rooms.ahead = {"async/groups/waiting": 1.0, "async/groups/playing": 2.0}

    async def settled(version: int) -> None:
        await asyncio.sleep(0.05)

    rooms.settled = settled  # type: ignore[method-assign]
    rooms.worked = lambda: 0.01  # type: ignore[method-assign]
    out = asyncio.run(loop(toy, rooms, max_steps=1).run(0)).metrics
    assert [out[name] for name in rooms.ahead] == [1, 2]
    assert out["time/trainer_idle"] == out["time/rollout"] >= 0.05
    assert 0.04 <= out["time/sampler_idle"] <= out["time/step"]
    assert out["time/publish"] == out["time/sync"]


@pytest.mark.parametrize(("ratio", "counted"), [(1, [0, 1, 2]), (2, [0, 1])])
def test_the_report_counts_the_steps_beside_which_another_is_played(toy: Toy, ratio: int, counted: list[int]) -> None:
    rooms = Rooms(every=100)
    rooms.ahead = {"async/groups/waiting": 1.0}
    run = loop(toy, rooms, max_steps=4, async_generation_ratio=ratio)
    noted: list[float] = []
    rooms.worked = lambda: noted.append(run.progress.history.waits.get("time/step", 0.0)) or 0.0  # type: ignore
    asyncio.run(run.run(0))
    # Asked in every step before it is noted: the sum grows by a step that counts.
    grown = [step for step, (a, b) in enumerate(pairwise([*noted, run.progress.history.waits["time/step"]])) if b > a]
    assert grown == counted


def test_a_role_that_goes_ends_the_wait_for_what_plays_ahead(toy: Toy) -> None:
    rooms = Rooms(every=100)

    async def settled(version: int) -> None:
        await asyncio.sleep(60)

    async def watch() -> None:
        if "learn 0" not in rooms.seen:
            await asyncio.Event().wait()
        raise TrainerError("actor_train: the process is gone")

    rooms.settled = settled  # type: ignore[method-assign]
    run = loop(toy, rooms, max_steps=2)
    run.guard = Guard(rooms.stop, [SimpleNamespace(watch=watch)])  # type: ignore[list-item]
    with pytest.raises(TrainerError, match="is gone"):
        asyncio.run(asyncio.wait_for(run.run(0), 10))
    assert rooms.seen[-1] == "rescue 1"
