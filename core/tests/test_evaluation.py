"""Evaluation: when it is due, what it keeps and reports, and that the baselines play once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from turnwise.config import load
from turnwise.contracts.rollout import RolloutResult
from turnwise.pipeline.clock import Clock
from turnwise.pipeline.evaluation import Evaluation
from turnwise.pipeline.guards import Guard, Stopped
from turnwise.pipeline.progress import Progress
from turnwise.pipeline.tracking import Tracking
from turnwise.testing.fakes import FakeLogger, FakeLoggerConfig
from turnwise.testing.synthetic import trajectories

Toy = Callable[..., Path]


class Scheduler:
    """Three episodes of the tag, with frames of the first."""

    def __init__(self) -> None:
        self.rendered: list[int] = []

    async def evaluate(self, *, render: int = 0) -> RolloutResult:
        self.rendered.append(render)
        await asyncio.sleep(0)
        frames = {("Toy", 0, 0): ["a lamp", "a dark lamp"]} if render else {}
        return RolloutResult(
            [evolve(one, tag="Toy") for one in trajectories(3, 1)], [], {}, frames, ["Toy, group 1: it broke."]
        )


class Room:
    """An evaluation on the fakes."""

    def __init__(self, toy: Toy, scheduler: Any, **changes: Any) -> None:
        self.config = load(toy(**changes)).config
        self.logger = FakeLogger(FakeLoggerConfig(), None)  # type: ignore[arg-type]
        self.progress, self.clock, self.stop = Progress(), Clock(), asyncio.Event()
        tracking = Tracking([("fake", self.logger)])
        self.evaluation = Evaluation(
            self.config, Path(), scheduler, tracking, self.progress, Guard(self.stop, []), self.clock
        )


def test_it_is_due_every_eval_steps_and_at_the_end_where_there_is_something_to_play(toy: Toy) -> None:
    room = Room(toy, Scheduler(), eval_steps=2)
    assert [room.evaluation.due(step) for step in range(4)] == [True, False, True, False]
    assert room.evaluation.due_at_end
    assert not Room(toy, Scheduler(), eval_at_end=False).evaluation.due_at_end
    nothing = Room(toy, None).evaluation
    assert not nothing.due(0)
    assert not nothing.due_at_end


def test_what_was_played_reaches_history_loggers_and_the_clock(toy: Toy) -> None:
    room = Room(toy, Scheduler(), render_save_dir="frames", render_episodes=1)
    values = asyncio.run(room.evaluation.play(2))
    assert values["val/Toy/failed"] == 0.0
    assert room.progress.history.evaluations == {2: values}
    assert len(room.logger.played[2, "val"]) == 3
    assert [path for _, _, path in room.logger.artifacts] == [Path("frames/step-000002/Toy-0-0.txt")]
    assert Path("frames/step-000002/Toy-0-0.txt").read_text(encoding="utf-8") == "a lamp\n\na dark lamp\n"
    assert room.clock.take().keys() == {"eval"}


def test_baselines_play_once_in_a_run(toy: Toy) -> None:
    room = Room(toy, Scheduler(), baselines=["first"])
    for step in (0, 2):
        asyncio.run(room.evaluation.play(step))
    assert list(room.progress.history.baselines) == ["first"]
    assert np.isfinite(room.progress.history.baselines["first"]["val/Toy/score/mean"])
    kept = room.progress.history.baselines["first"]
    asyncio.run(room.evaluation.play(4))
    assert room.progress.history.baselines["first"] is kept


def test_a_stop_leaves_nothing_of_it_behind(toy: Toy) -> None:
    room = Room(toy, Scheduler())
    room.stop.set()
    with pytest.raises(Stopped):
        asyncio.run(room.evaluation.play(0))
    assert room.progress.history.evaluations == {}
    assert room.logger.played == {}
