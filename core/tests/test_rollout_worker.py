"""What plays episodes in one process: environments of a pool, and what an episode waits for, by which a run knows that
something moves."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.contracts.env_manager import Episode, Limits, Sampler
from turnwise.contracts.player import Player
from turnwise.contracts.rollout import EpisodeSpec, RolloutSettings, TagPlan
from turnwise.data import Sample, Trajectory
from turnwise.errors import EnvironmentFailure, TurnwiseError
from turnwise.rollout import LocalExecutor, worker
from turnwise.rollout.hosts import HOSTS
from turnwise.rollout.sweeper import Sweeper
from turnwise.rollout.watchdog import Watchdog
from turnwise.testing.fakes import FakeEnvironment
from turnwise.testing.ticks import run_in_ticks

LIMITS = Limits(8, 1, 1, 1)


class Opens:
    """A manager that does nothing but reset."""

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        await episode.environment.reset()
        return Trajectory(episode.tag, episode.group, episode.member, episode.seed, (), "turns")

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        return []


def plan(build: Callable[[], Any], **options: Any) -> TagPlan:
    merged: dict[str, Any] = {"tag": "Count", "groups": 1, "group_size": 1, "step": "inline"} | options
    return TagPlan(build=build, manager=Opens(), limits=LIMITS, **merged)  # type: ignore[arg-type]


def executor(*plans: TagPlan, sharing: int = 1) -> LocalExecutor:
    return LocalExecutor(plans, RolloutSettings(seed=0), Player(), None, sharing=sharing)


async def played(here: LocalExecutor, *specs: EpisodeSpec) -> list[Any]:
    try:
        return await asyncio.gather(*(here.play(spec, lambda error: None) for spec in specs))
    finally:
        await here.close()


def spec(tag: str = "Count", member: int = 0, rendered: bool = False) -> EpisodeSpec:
    return EpisodeSpec(tag, 4, member, 0, 7, rendered=rendered)


# ---------------------------------------------------------------- environments


class SlowHost:
    """In place of a host: counts the processes that start, from the call, with which their clock begins, to its end."""

    starting = most = built = 0
    lost = False

    def __init__(self, tag: str, build: Any, sweeper: Sweeper) -> None:
        pass

    async def call(self, method: str, timeout: float, **arguments: Any) -> Any:
        if method == "start":
            SlowHost.starting += 1
            SlowHost.most = max(SlowHost.most, SlowHost.starting)
            await asyncio.sleep(10)
            SlowHost.starting -= 1
        SlowHost.built += method == "build"
        return ("start", {})

    async def close(self, timeout: float) -> None:
        pass


def test_processes_start_as_many_at_once_as_there_are_cores_for_and_their_clock_begins_with_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(HOSTS, "process", SlowHost)  # type: ignore[arg-type]
    monkeypatch.setattr(worker, "cores", lambda: 6)
    here = executor(*(plan(object, tag=tag, group_size=8, step="process") for tag in "ab"), sharing=2)
    run_in_ticks(played(here, *(spec(tag, member) for tag in "ab" for member in range(8))))
    assert (SlowHost.most, SlowHost.built) == (3, 16)


def test_an_episode_is_played_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"world_{tmp_path.name.replace('-', '_')}"
    text = "from turnwise.testing.fakes import FakeEnvironment\n\nclass World(FakeEnvironment):\n    pass\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    here = executor(plan(importlib.import_module(name).World, step="process"))
    (one,) = asyncio.run(played(here, spec()))
    assert [trajectory.group for trajectory in one.trajectories] == [4]


# ---------------------------------------------------------------- what moves


class Telling(FakeEnvironment):
    """Notes at every call of its environment what the executor says that its episode waits for."""

    here: LocalExecutor
    told: list[str]

    def __init__(self, fails: bool = False) -> None:
        Telling.note()
        super().__init__()
        self.fails_reset = fails

    @staticmethod
    def note() -> None:
        Telling.told += [line.split(": ")[1].split(", for ")[0] for line in Telling.here.waits()]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.note()
        if self.fails_reset:
            raise RuntimeError("boom")
        return super().reset(seed=seed, options=options)

    def render(self) -> Any:
        self.note()
        return super().render()

    def close(self) -> None:
        self.note()


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (False, ["its environment's build", "its environment's reset", "its environment's render"]),
        (True, ["its environment's build", "its environment's reset", "its environment's close"]),
    ],
)
def test_every_call_of_an_environment_is_told(fails: bool, told: list[str]) -> None:
    Telling.here, Telling.told = executor(plan(lambda: Telling(fails))), []
    if fails:
        with pytest.raises(EnvironmentFailure, match="boom"):
            run_in_ticks(played(Telling.here, spec(rendered=True)))
    else:
        run_in_ticks(played(Telling.here, spec(rendered=True)))
    assert Telling.told == told


@pytest.mark.parametrize(("timeout", "stalls"), [(15.0, False), (5.0, True)])
def test_processes_that_start_one_after_the_other_are_no_stall(
    monkeypatch: pytest.MonkeyPatch, timeout: float, stalls: bool
) -> None:
    """Eight starts of 10 s each, and no episode begins to play before the last."""
    monkeypatch.setitem(HOSTS, "process", SlowHost)  # type: ignore[arg-type]
    monkeypatch.setattr(worker, "cores", lambda: 1)

    async def run() -> None:
        here = executor(plan(object, group_size=8, step="process"))
        done = asyncio.get_running_loop().create_future()
        playing = asyncio.ensure_future(played(here, *(spec(member=member) for member in range(8))))
        # What is played ends late: only starts move until then.
        monkeypatch.setattr(Opens, "run", late)
        playing.add_done_callback(lambda task: done.done() or done.set_result(None))
        try:
            await Watchdog(here, timeout).wait(done)
        finally:
            playing.cancel()

    started = asyncio.Event()

    async def late(self: Opens, episode: Episode, sampler: Sampler) -> Trajectory:
        if episode.member == 7:
            started.set()
        await started.wait()
        return Trajectory(episode.tag, episode.group, episode.member, episode.seed, (), "turns")

    if stalls:
        told = "7 wait for its turn to start a process, 1 wait for its environment's process"
        with pytest.raises(TurnwiseError, match=told):
            run_in_ticks(run())
    else:
        run_in_ticks(run())
