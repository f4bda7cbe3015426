"""Environments inline, in threads and in processes: what they raise, how they hang, and what is left of them."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turnwise.contracts.environment import Response
from turnwise.contracts.rollout import EnvironmentTimeout
from turnwise.errors import EnvironmentFailure
from turnwise.rollout.hosts import HOSTS, Host
from turnwise.rollout.sweeper import Sweeper

MODES = ["inline", "thread", "process"]
SOURCE = '''
import asyncio, os, signal, subprocess, sys, time

class World:
    """`step(action)` does what the action names."""

    def __init__(self, log=None, fail=False, slow=0.0):
        if fail:
            raise RuntimeError("no such level")
        time.sleep(slow)
        self.log = log

    def reset(self, *, seed=None, options=None):
        return f"seed {seed} options {options}", {"pid": os.getpid()}

    def step(self, action):
        if action == "raise":
            raise ValueError("two\\nlines")
        if action == "exit":
            sys.exit(3)
        if action == "stop":
            raise StopIteration
        if action == "die":
            os._exit(7)
        if action == "hang":
            time.sleep(1.0)
        if action == "hang for ever":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            with open(self.log, "w") as file:
                file.write(f"{os.getpid()} {child.pid}")
            time.sleep(60)
        if action == "unpicklable":
            return lambda: None
        return action.upper(), 1.0, False, False, {}

    def close(self):
        if self.log:
            with open(self.log, "a") as file:
                file.write(" closed")

class AsyncWorld:
    async def reset(self, *, seed=None, options=None):
        await asyncio.sleep(0)
        return "hello", {}

    async def step(self, action):
        await asyncio.sleep(30.0 if action == "hang" else 0.0)
        if action == "raise":
            raise ValueError("boom")
        return action.upper(), 0.0, False, False, {}

    async def close(self):
        await asyncio.sleep(0)
'''


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its environments."""
    return module("world", SOURCE, tmp_path, monkeypatch)


def module(kind: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that a spawned process can import, too."""
    name = f"{kind}_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(name)


def play(mode: Any, build: Callable[[], Any], scene: Callable[[Host], Awaitable[Any]], shortest: float = 20.0) -> Any:
    async def run() -> Any:
        sweeper = Sweeper(shortest)
        host = HOSTS[mode]("World", build, sweeper)
        try:
            await host.call("build", 20.0)
            return await scene(host)
        finally:
            await host.close(5.0)
            sweeper.stop()
            await asyncio.sleep(0.01)  # for what was cancelled to end
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return asyncio.run(run())


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def environment_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "environment World"]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("mode", MODES)
def test_calls_return_what_the_environment_returns(mode: str, world: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def scene(host: Host) -> None:
        observation, info = await host.call("reset", 20.0, seed=5, options={"index": 2})
        assert observation == "seed 5 options {'index': 2}"
        assert (info["pid"] == os.getpid()) == (mode != "process")
        assert await host.call("step", 20.0, action="up") == ("UP", 1.0, False, False, {})
        assert await host.call("render", 20.0) is None  # it has none

    play(mode, partial(world.World, log=str(log)), scene)
    assert log.read_text() == " closed"
    wait_for(lambda: not environment_threads())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", ["World", "AsyncWorld"])
def test_an_exception_is_a_failure_with_its_cause(mode: str, build: str, world: ModuleType) -> None:
    async def scene(host: Host) -> None:
        with pytest.raises(
            EnvironmentFailure,
            match=r"^World\.step raised ValueError: (two lines|boom), at .*world_.*\.py:\d+ in step$",
        ) as caught:
            await host.call("step", 20.0, action="raise")
        assert caught.value.__cause__ is not None
        if mode == "process":
            assert "in step" in str(caught.value.__cause__.__cause__)  # the traceback of the other process
        assert (await host.call("step", 20.0, action="on"))[0] == "ON"

    play(mode, getattr(world, build), scene)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("action", "what"), [("exit", "SystemExit: 3"), ("stop", "StopIteration")])
def test_an_environment_that_exits_is_a_failure_and_no_end_of_the_run(
    mode: str, action: str, what: str, world: ModuleType
) -> None:
    async def scene(host: Host) -> None:
        with pytest.raises(EnvironmentFailure, match=what):
            await host.call("step", 20.0, action=action)

    play(mode, world.World, scene)


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_that_cannot_be_built_says_why(mode: str, world: ModuleType) -> None:
    async def scene(host: Host) -> None:
        raise AssertionError("not reached")

    with pytest.raises(
        EnvironmentFailure,
        match=r"^World\.build raised RuntimeError: no such level, at .*world_.*\.py:\d+ in __init__$",
    ):
        play(mode, partial(world.World, fail=True), scene)
    wait_for(lambda: not environment_threads())


@pytest.mark.parametrize("mode", MODES)
def test_a_coroutine_is_awaited_and_its_hang_is_a_timeout(mode: str, world: ModuleType) -> None:
    async def scene(host: Host) -> None:
        assert await host.call("reset", 20.0, seed=1, options=None) == ("hello", {})
        with pytest.raises(EnvironmentTimeout, match=r"World\.step did not return within 0\.1 s \(step_timeout\)"):
            await host.call("step", 0.1, action="hang")
        assert host.lost

    play(mode, world.AsyncWorld, scene, shortest=0.1)
    wait_for(lambda: not environment_threads())


def test_a_hanging_thread_is_abandoned_and_closes_its_environment_when_the_call_returns(
    world: ModuleType, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    async def scene(host: Host) -> float:
        start = time.monotonic()
        with pytest.raises(EnvironmentTimeout):
            await host.call("step", 0.1, action="hang")
        return time.monotonic() - start

    assert play("thread", partial(world.World, log=str(log)), scene, shortest=0.1) < 0.8
    assert environment_threads()
    wait_for(lambda: not environment_threads())
    assert log.read_text() == " closed"


def test_a_hanging_process_is_killed_with_what_it_started(world: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def scene(host: Host) -> list[int]:
        with pytest.raises(EnvironmentTimeout):
            await host.call("step", 1.5, action="hang for ever")
        return [int(pid) for pid in log.read_text().split()]

    pids = play("process", partial(world.World, log=str(log)), scene, shortest=0.2)
    assert len(pids) == 2
    wait_for(lambda: not any(alive(pid) for pid in pids))
    wait_for(lambda: not environment_threads())


def test_a_process_that_hangs_while_it_builds_is_killed(world: ModuleType) -> None:
    async def run() -> None:
        sweeper = Sweeper(0.1)
        host = HOSTS["process"]("World", partial(world.World, slow=60.0), sweeper)
        with pytest.raises(EnvironmentTimeout, match=r"World\.build .*reset_timeout"):
            await host.call("build", 0.2)
        sweeper.stop()

    asyncio.run(run())
    wait_for(lambda: not environment_threads())


def test_a_process_that_dies_is_a_failure(world: ModuleType) -> None:
    async def scene(host: Host) -> None:
        with pytest.raises(EnvironmentFailure, match="found its process dead, with exit code 7"):
            await host.call("step", 20.0, action="die")

    play("process", world.World, scene)


def test_what_cannot_be_sent_from_a_process_is_a_failure(world: ModuleType) -> None:
    async def scene(host: Host) -> None:
        with pytest.raises(EnvironmentFailure, match="cannot be sent to another process"):
            await host.call("step", 20.0, action="unpicklable")

    play("process", world.World, scene)


def test_a_build_that_cannot_be_pickled_is_a_failure() -> None:
    async def scene(host: Host) -> None:
        raise AssertionError("not reached")

    with pytest.raises(EnvironmentFailure, match="pickle"):
        play("process", lambda: None, scene)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_cancelled_call_leaves_nothing_that_waits(mode: str, world: ModuleType) -> None:
    async def scene(host: Host) -> None:
        call = asyncio.ensure_future(host.call("step", 20.0, action="hang"))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert host.lost

    play(mode, world.World, scene)
    wait_for(lambda: not environment_threads())


LEVELS = '''
import json

class Level:
    """Fails in a helper of its own, in a library that the helper calls, or at once."""

    def __init__(self, broken=False):
        if broken:
            raise RuntimeError("no such level")

    def reset(self, *, seed=None, options=None):
        return "start", {}

    def step(self, action):
        return self._judged(action)

    def _judged(self, action):
        return json.loads(action)
'''


@pytest.mark.parametrize("mode", MODES)
def test_an_error_names_the_file_and_line_of_the_environments_own_code(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = module("level", LEVELS, tmp_path, monkeypatch)
    level = made.Level

    async def step(host: Host) -> str:
        with pytest.raises(EnvironmentFailure) as caught:
            await host.call("step", 20.0, action="{")
        return str(caught.value)

    own = made.__file__
    assert own is not None
    assert re.fullmatch(
        rf"World\.step raised JSONDecodeError: .*, at {re.escape(own)}:18 in _judged", play(mode, level, step)
    )
    with pytest.raises(
        EnvironmentFailure,
        match=rf"World\.build raised RuntimeError: no such level, at {re.escape(own)}:9 in __init__",
    ):
        play(mode, partial(level, broken=True), step)


JUDGED = '''
class Judged:
    """Rewards short responses: it reads the whole response beside the action."""

    def reset(self, *, seed=None, options=None):
        return "start", {}

    def step(self, action, response=None):
        text = "nothing" if response is None else f"{response.text} {response.finish} {response.tokens}"
        return f"{action}: {text}", 0.0, False, False, {}
'''


@pytest.mark.parametrize("mode", MODES)
def test_the_whole_response_reaches_an_environment_that_takes_it(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = module("judged", JUDGED, tmp_path, monkeypatch).Judged

    async def scene(host: Host) -> list[str]:
        whole = Response("<a>Up</a>", "length", 5)
        return [(await host.call("step", 20.0, action="Up", response=response))[0] for response in (whole, None)]

    assert play(mode, judged, scene) == ["Up: <a>Up</a> length 5", "Up: nothing"]


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_that_takes_no_response_is_given_none(mode: Any, world: ModuleType) -> None:
    async def scene(host: Host) -> str:
        observation: str = (await host.call("step", 20.0, action="up", response=Response("<a>up</a>", "stop", 5)))[0]
        return observation

    assert play(mode, world.World, scene) == "UP"
