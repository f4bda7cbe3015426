"""Where episodes come from: played, played and written, read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import load
from turnwise.contracts.rollout import RolloutResult
from turnwise.errors import CheckpointError
from turnwise.pipeline.rollouts import Dumped, Dumping, Live
from turnwise.rollout import mock

Toy = Callable[..., Path]
PLAYED = RolloutResult([], [], {"episodes": 4.0}, {}, ["one failed"])


class Scheduler:
    """Answers, and notes what it is asked."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def next_batch(self, step: int, *, version: int) -> RolloutResult:
        self.seen.append((step, version))
        return PLAYED

    async def settled(self, version: int) -> None:
        self.seen.append(f"settled {version}")

    async def hold(self) -> None:
        self.seen.append("hold")

    async def release(self) -> None:
        self.seen.append("release")

    def worked(self) -> float:
        return 1.5

    def state(self, first: int) -> dict[str, Any]:
        return {"queue": [f"a group of step {first}"]}

    def load_state(self, state: dict[str, Any]) -> None:
        self.seen.append(state)

    async def close(self) -> None:
        self.seen.append("closed")


def test_live_episodes_are_the_schedulers_and_so_is_their_state() -> None:
    scheduler: Any = Scheduler()
    source = Live(scheduler)

    async def run() -> None:
        await source.hold()
        await source.release()
        assert await source.next(2, 1) is PLAYED
        await source.settled(3)
        await source.close()

    source.restore({"queue": []})
    asyncio.run(run())
    assert scheduler.seen == [{"queue": []}, "hold", "release", (2, 1), "settled 3", "closed"]
    assert source.state(3) == {"queue": ["a group of step 3"]}
    assert source.worked() == 1.5


def test_what_is_dumped_is_played_once_and_read_as_it_was(toy: Toy) -> None:
    config = load(toy(rollout_mock={"enable": True, "mode": "dump", "dump_dir": "dump"})).config
    scheduler: Any = Scheduler()
    assert asyncio.run(Dumping(scheduler, config).next(2, 2)) is PLAYED
    assert scheduler.seen == [(2, 2)]
    read = asyncio.run(Dumped(config).next(2, 7))  # whatever weights serve
    assert (read.counts, read.failures) == (PLAYED.counts, PLAYED.failures)
    assert mock.file_of(config, 2).is_file()


def test_a_dump_holds_nothing_open_and_takes_up_nothing_that_was_played(toy: Toy) -> None:
    source = Dumped(load(toy(rollout_mock={"enable": True, "mode": "mock", "dump_dir": "dump"})).config)
    assert source.state(2) == {"queue": []}
    source.restore(source.state(2))
    assert (source.gauges(), source.worked()) == ({}, 0.0)
    with pytest.raises(
        CheckpointError, match=r"holds groups that were played and not trained.*Fix: resume without rollout_mock"
    ):
        source.restore({"queue": ["a group"]})
