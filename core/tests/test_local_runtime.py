"""The local runtime: a strategy on a thread of its own, whose results, exceptions and silences reach the caller."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from turnwise.contracts.runtime import RuntimeContext, ServePlan, TrainPlan
from turnwise.errors import PluginError, TrainerError
from turnwise.hookspecs import Implementation
from turnwise.pipeline.local import SWITCH_SECONDS, LocalRole, LocalRuntime
from turnwise.plugins import registry
from turnwise.testing.registered import made, registered


class Worker:
    """A strategy with methods that answer, raise, or wait for `gate`."""

    closed: ClassVar[list[str]] = []
    gate = threading.Event()

    def __init__(self, config: Any, context: Any) -> None:
        if context == "broken":
            raise RuntimeError("cannot be built")
        self.name, self.built_on = context, threading.current_thread().name

    def where(self) -> tuple[str, str]:
        return self.built_on, threading.current_thread().name

    def add(self, a: int, b: int) -> int:
        return a + b

    def fail(self, error: BaseException) -> None:
        raise error

    def wait(self) -> str:
        self.gate.wait(10)
        return "waited"

    def close(self) -> None:
        self.closed.append(self.name)
        if self.name == "stubborn":
            raise OSError("will not close")


class Backend(Worker):
    async def close(self) -> None:  # type: ignore[override]
        self.closed.append(self.name)


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    Worker.closed.clear()
    Worker.gate.clear()
    backend = ("inference_backend", Implementation("backend", Backend))
    with registered(("train_strategy", Implementation("worker", Worker)), backend):
        yield
    Worker.gate.set()


def plan(context: Any = "w", role: str = "actor_train") -> TrainPlan:
    return TrainPlan(role, "worker", None, context)


def runtime(timeout: float = 30.0) -> LocalRuntime:
    return LocalRuntime(None, RuntimeContext(timeout=timeout))


def threads(role: str = "actor_train") -> int:
    return sum(t.name == f"turnwise-{role}" for t in threading.enumerate())


def ended(role: str = "actor_train") -> bool:
    """Whether the role's threads end within a second."""
    deadline = time.monotonic() + 1
    while threads(role) and time.monotonic() < deadline:
        time.sleep(0.005)
    return not threads(role)


def test_everything_of_a_strategy_happens_on_its_own_thread() -> None:
    async def run() -> None:
        here = runtime()
        role = await here.train(plan())
        assert await role.run("where", lambda worker: worker.where()) == ("turnwise-actor_train",) * 2
        assert await role.run("add", lambda worker: worker.add(2, 3)) == 5
        await here.close()

    asyncio.run(run())
    assert ended()


def test_the_event_loop_stays_free_while_a_strategy_works() -> None:
    async def run() -> None:
        here = runtime()
        role = await here.train(plan())
        waiting = asyncio.ensure_future(role.run("wait", lambda worker: worker.wait()))
        later = asyncio.ensure_future(role.run("add", lambda worker: worker.add(1, 1)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        assert not later.done()  # calls run one after the other
        Worker.gate.set()
        assert await waiting == "waited"
        assert await later == 2
        await here.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "raised", [ValueError("bad row"), TrainerError("out of memory"), TimeoutError("its own"), KeyError("x")]
)
def test_an_exception_is_raised_where_it_was_called_and_the_role_lives_on(raised: Exception) -> None:
    async def run() -> None:
        here = runtime()
        role = await here.train(plan())
        with pytest.raises(type(raised)) as caught:
            await role.run("fail", lambda worker: worker.fail(raised))
        assert caught.value is raised
        assert await role.run("add", lambda worker: worker.add(1, 2)) == 3
        await here.close()

    asyncio.run(run())
    assert Worker.closed == ["w"]


def test_what_futures_cannot_carry_is_still_an_error() -> None:
    async def run() -> None:
        here = runtime()
        role = await here.train(plan())
        with pytest.raises(RuntimeError, match="StopIteration"):
            await role.run("fail", lambda worker: worker.fail(StopIteration()))
        with pytest.raises(AttributeError):
            await role.run("no_such_method", lambda worker: worker.no_such_method())
        await here.close()

    asyncio.run(run())


def test_a_call_past_the_timeout_names_role_and_method_and_closing_does_not_wait_for_it() -> None:
    async def run() -> None:
        here = runtime(timeout=0.05)
        role = await here.train(plan(role="critic"))
        with pytest.raises(
            TrainerError,
            match=r"^critic: wait did not end within runtime_timeout = 0\.05 s\. Fix: raise runtime_timeout, or lower",
        ):
            await role.run("wait", lambda worker: worker.wait())
        await here.close()  # waiting for it would be another timeout

    asyncio.run(run())
    assert Worker.closed == []  # it is still in the call
    Worker.gate.set()
    assert ended("critic")


def test_a_cancelled_call_leaves_the_strategy_behind_at_once() -> None:
    async def run() -> None:
        here = runtime()
        role = await here.train(plan())
        call = asyncio.ensure_future(role.run("wait", lambda worker: worker.wait()))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(here.close(), 1)

    asyncio.run(run())  # the answer comes when this loop is closed: nobody waits, nothing is raised
    Worker.gate.set()
    assert ended()


def test_after_a_call_that_was_given_up_the_next_waits_for_its_end_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("turnwise.pipeline.local.GRACE_SECONDS", 0.2)
    asked = threading.Event()

    async def run() -> None:
        here = runtime(60.0)
        role = await here.train(plan())
        given_up = asyncio.ensure_future(role.run("send", lambda strategy: asked.wait(30)))
        await asyncio.sleep(0.05)
        given_up.cancel()
        await asyncio.wait([given_up])
        with pytest.raises(TrainerError, match="actor_train: save cannot begin, for an earlier call still runs"):
            await role.run("save", lambda strategy: "saved")
        asked.set()
        assert await role.run("save", lambda strategy: "saved") == "saved"
        await here.close()

    asyncio.run(run())


def test_a_strategy_that_cannot_be_built_is_a_plugins_fault_and_leaves_no_thread() -> None:
    async def run() -> None:
        here = runtime()
        with pytest.raises(PluginError, match="cannot be built: RuntimeError: cannot be built"):
            await here.train(plan("broken"))
        with pytest.raises(PluginError, match="no train strategy is named 'nothing'"):
            await here.train(TrainPlan("actor_train", "nothing", None, None))
        await here.close()

    asyncio.run(run())
    assert ended()


def test_roles_and_runtime_close_twice_and_a_closed_role_says_so() -> None:
    async def run() -> None:
        here = runtime()
        role = await here.train(plan())
        for _ in range(2):
            await role.close()
        with pytest.raises(TrainerError, match="actor_train: add was called after close"):
            await asyncio.wait_for(role.run("add", lambda worker: worker.add(1, 2)), 1)
        for _ in range(2):
            await here.close()

    asyncio.run(run())
    assert Worker.closed == ["w"]
    assert ended()


def test_roles_close_in_reverse_and_one_that_fails_keeps_none_open() -> None:
    async def run() -> None:
        here = runtime()
        await here.train(plan("first"))
        await here.serve(ServePlan("actor_infer", "backend", None, "second"))
        await here.train(plan("stubborn"))
        with pytest.raises(OSError, match="will not close"):
            await here.close()
        await here.close()

    asyncio.run(run())
    assert Worker.closed == ["stubborn", "second", "first"]
    assert ended()


def test_a_backend_is_placed_as_it_is_in_this_thread() -> None:
    async def run() -> None:
        here = runtime()
        placed = await here.serve(ServePlan("actor_infer", "backend", None, "b"))
        assert isinstance(placed, Backend)
        assert placed.built_on == threading.current_thread().name
        await here.close()

    assert LocalRuntime.capabilities.one_process
    asyncio.run(run())


def test_threads_take_turns_often_until_the_end_of_the_run() -> None:
    before = sys.getswitchinterval()

    async def run() -> None:
        here = runtime()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
        await here.close()
        await here.close()

    asyncio.run(run())
    assert sys.getswitchinterval() == before


def test_environment_variables_of_roles_are_there_when_they_are_built_and_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OF_THE_SHELL", "before")
    monkeypatch.delenv("OF_THE_ROLE", raising=False)
    seen: list[tuple[str | None, str | None]] = []

    class Curious(Worker):
        def __init__(self, config: Any, context: Any) -> None:
            super().__init__(config, context)
            seen.append((os.environ.get("OF_THE_SHELL"), os.environ.get("OF_THE_ROLE")))

    registry().add(made("train_strategy", Implementation("curious", Curious)))

    async def run() -> None:
        here = runtime()
        await here.train(
            TrainPlan("actor_train", "curious", None, "a", environment={"OF_THE_SHELL": "role", "OF_THE_ROLE": "1"})
        )
        await here.train(TrainPlan("reference", "curious", None, "b", environment={"OF_THE_SHELL": "role"}))
        await here.close()

    asyncio.run(run())
    assert seen == [("role", "1"), ("role", "1")]
    assert os.environ["OF_THE_SHELL"] == "before"
    assert "OF_THE_ROLE" not in os.environ


def test_the_watch_of_a_role_in_this_process_never_ends() -> None:
    async def run() -> None:
        here = runtime()
        watch = asyncio.ensure_future((await here.train(plan())).watch())
        await asyncio.wait([watch], timeout=0.05)
        assert not watch.done()
        watch.cancel()
        await here.close()

    asyncio.run(run())


def test_a_role_serves_several_event_loops_in_turn() -> None:
    role = asyncio.run(LocalRole.start(plan(), 30.0))
    assert asyncio.run(role.run("add", lambda worker: worker.add(2, 2))) == 4
    asyncio.run(role.close())
    assert ended()
