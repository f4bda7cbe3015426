"""Several sampling engines behind one backend: where requests go, who has which weights, and what happens when one
dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("ray", reason="ray is not installed")

from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.data.rows import Update
from turnwise.errors import EngineError, EngineLost
from turnwise.testing.fake_model import FakeChat
from turnwise.testing.synthetic import training_rows

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("cluster"), pytest.mark.filterwarnings("ignore")]


def ask(member: int, turn: int = 0) -> Request:
    ids = FakeChat().render([{"role": "user", "content": "x"}])
    return Request(
        seed=100 * member + turn, args=GeneratingArgs(), max_new_tokens=4, order=(0, 7, member, 0, turn), ids=ids
    )


async def sync(role: Any, backend: Any, version: int) -> int:
    await backend.pause()
    offer = await role.offer("fake", version, backend.receivers("fake"))
    _, now = await asyncio.gather(role.send(offer), backend.receive(offer))
    await backend.resume()
    return int(now)


async def until(condition: Any, seconds: float = 60.0) -> None:
    for _ in range(int(seconds * 20)):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not happen")


def serving(backend: Any) -> Callable[[], int]:
    """How many engines serve at the moment."""
    now: dict[str, int] = {}
    backend.listen(lambda members, failed: now.update(engines=len(members)))
    return lambda: now["engines"]


async def many(backend: Any) -> None:
    """Ask until it ends."""
    for member in range(1000):
        await backend.generate(ask(member))


def test_a_trajectory_stays_on_one_engine_and_all_have_the_weights(place: Any, trainer: Any, sampler: Any) -> None:
    async def work(runtime: Any) -> None:
        role, backend = await runtime.train(trainer()), await runtime.serve(sampler((0, 1)))
        assert backend.receivers("fake") == 2
        with pytest.raises(EngineError, match="before its first weights"):
            await backend.generate(ask(0))
        assert await sync(role, backend, 4) == 4
        first = await asyncio.gather(*(backend.generate(ask(m)) for m in range(8)))
        pids = [g.extras["pid"] for g in first]
        assert sorted(pids.count(pid) for pid in set(pids)) == [4, 4]
        for turn in (1, 2):
            later = await asyncio.gather(*(backend.generate(ask(m, turn)) for m in range(8)))
            assert [g.extras["pid"] for g in later] == pids
        assert {v for g in first for v in g.versions.tolist()} == {4}
        assert len({g.extras["sum"] for g in first}) == 1

    place(work)


def test_requests_of_a_dead_engine_are_answered_by_another_and_it_comes_back_with_the_weights(
    place: Any, trainer: Any, sampler: Any, tmp_path: Path
) -> None:
    async def work(runtime: Any) -> None:
        role = await runtime.train(trainer())
        await role.update(Update(training_rows(), 0.5))  # so that the first weights are not those of the folder
        backend = await runtime.serve(sampler((0, 1), environment={"MORTAL_ENGINE": str(tmp_path / "died")}))
        engines = serving(backend)
        await sync(role, backend, 1)
        answers = await asyncio.gather(*(backend.generate(ask(m)) for m in range(12)))
        assert (tmp_path / "died").exists()
        again = await asyncio.gather(*(backend.generate(ask(m)) for m in range(12)))
        for one, other in zip(answers, again, strict=True):
            np.testing.assert_array_equal(one.ids, other.ids)  # the same seeds, whoever answered
        await until(lambda: engines() == 2)
        both = await asyncio.gather(*(backend.generate(ask(m)) for m in range(100, 108)))
        assert len({g.extras["pid"] for g in both}) == 2
        assert (
            len({g.extras["sum"] for g in [*both, *answers]}) == 1
        )  # the new engine has the trainer's weights, not the folder's

    place(work)


def test_an_engine_that_comes_back_while_the_trainer_moves_on_waits_for_the_next_weights(
    place: Any, trainer: Any, sampler: Any
) -> None:
    async def work(runtime: Any) -> None:
        role, backend = await runtime.train(trainer()), await runtime.serve(sampler((0, 1)))
        engines = serving(backend)
        await sync(role, backend, 1)
        victim = (await backend.generate(ask(0))).extras["pid"]
        await role.update(Update(training_rows(), 0.5))
        os.kill(victim, signal.SIGKILL)
        await until(lambda: engines() == 1)
        await until(lambda: backend.receivers("fake") == 2)
        assert {
            g.extras["pid"] for g in await asyncio.gather(*(backend.generate(ask(m)) for m in range(6)))
        }.isdisjoint({victim})
        assert engines() == 1
        assert await sync(role, backend, 2) == 2
        assert (
            len({g.extras["sum"] for g in await asyncio.gather(*(backend.generate(ask(m)) for m in range(200, 206)))})
            == 1
        )
        assert engines() == 2

    place(work)


def test_engines_that_die_too_often_end_the_requests_with_the_cause(place: Any, trainer: Any, sampler: Any) -> None:
    async def work(runtime: Any) -> None:
        role, backend = await runtime.train(trainer()), await runtime.serve(sampler())
        await sync(role, backend, 1)
        victim = (await backend.generate(ask(0))).extras["pid"]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(
            EngineError, match=r"actor_infer\.0 died more than max_restarts: 0 times\. Last cause: .*raise max_restarts"
        ) as caught:
            await asyncio.gather(*(many(backend) for _ in range(3)))
        assert "\n" not in str(caught.value)

    place(work, max_restarts=0)


def lose(method: str) -> None:
    """An engine of the backend `losing` ends at its next call of `method`."""
    Path(f"LOSE_{method}").touch()


def test_an_engine_that_reports_its_end_is_closed_replaced_and_its_requests_are_answered(
    place: Any, trainer: Any, sampler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The process of its backend still lives when it reports it."""

    async def work(runtime: Any) -> None:
        role = await runtime.train(trainer())
        await role.update(Update(training_rows(), 0.5))
        backend = await runtime.serve(sampler((0, 1), name="losing"))
        engines = serving(backend)
        await sync(role, backend, 1)
        before = await asyncio.gather(*(backend.generate(ask(m)) for m in range(12)))
        lose("generate")
        after = await asyncio.gather(*(backend.generate(ask(m)) for m in range(12)))
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one.ids, other.ids)
        victim = int(next(Path().glob("lost_by_*")).name.removeprefix("lost_by_"))
        await until(lambda: engines() == 2)
        assert Path(f"closed_by_{victim}").exists()
        await until(lambda: not psutil.pid_exists(victim))
        both = await asyncio.gather(*(backend.generate(ask(m)) for m in range(100, 108)))
        assert len({g.extras["pid"] for g in both}) == 2 and victim not in {g.extras["pid"] for g in both}
        assert len({g.extras["sum"] for g in [*both, *before]}) == 1  # the new engine has the current weights
        assert backend.idle

    place(work)
    messages = [record.getMessage() for record in caplog.records if "is built again" in record.getMessage()]
    assert len(messages) == 1
    assert "died: the engine ran out of steam. Fix: more coal. It is built again (1 of max_restarts: 3)" in messages[0]


@pytest.mark.parametrize("devices", [(), pytest.param((0, 1), marks=pytest.mark.matrix)])
def test_an_engine_that_ended_while_nothing_was_asked_is_replaced_before_the_next_weights(
    place: Any, trainer: Any, sampler: Any, devices: tuple[int, ...]
) -> None:
    """The only one is waited for; the others of several take the weights without it."""

    async def work(runtime: Any) -> None:
        role, backend = await runtime.train(trainer()), await runtime.serve(sampler(devices, name="losing"))
        await sync(role, backend, 1)
        await role.update(Update(training_rows(), 0.5))
        lose("pause")
        assert await sync(role, backend, 2) == 2
        answers = await asyncio.gather(*(backend.generate(ask(m)) for m in range(6)))
        assert {v for g in answers for v in g.versions.tolist()} == {2}
        await until(lambda: serving(backend)() == max(1, len(devices)))

    place(work)


def test_an_engine_that_ends_while_it_takes_weights_ends_the_update(place: Any, trainer: Any, sampler: Any) -> None:
    async def work(runtime: Any) -> None:
        role, backend = await runtime.train(trainer()), await runtime.serve(sampler((), name="losing"))
        lose("receive")
        with pytest.raises(EngineLost, match=r"actor_infer\.0: the engine ran out of steam\. Fix: more coal"):
            await sync(role, backend, 1)

    place(work)


def test_when_an_engine_ends_while_weights_are_on_their_way_the_others_take_them_no_longer(
    place: Any, trainer: Any, sampler: Any, tmp_path: Path
) -> None:
    async def work(runtime: Any) -> None:
        role, backend = await runtime.train(trainer()), await runtime.serve(sampler((0, 1), name="losing"))
        (tmp_path / "STUCK").touch()
        lose("receive")
        tasks = asyncio.all_tasks()
        with pytest.raises(EngineLost, match="the engine ran out of steam"):
            await sync(role, backend, 1)
        assert not [task for task in asyncio.all_tasks() - tasks if "RayBackend._receive" in repr(task)]
        await until(lambda: list(tmp_path.glob("gave_up_*")), 20)

    place(work)


@pytest.mark.matrix
def test_engines_that_end_too_often_are_reported_like_those_that_die(place: Any, trainer: Any, sampler: Any) -> None:
    async def work(runtime: Any) -> None:
        role, backend = await runtime.train(trainer()), await runtime.serve(sampler((), name="losing"))
        await sync(role, backend, 1)
        lose("generate")
        with pytest.raises(
            EngineError,
            match=r"max_restarts: 0 times\. Last cause: the engine ran out of steam\. Fix: more coal\. Fix: look",
        ):
            await backend.generate(ask(0))

    place(work, max_restarts=0)


def test_a_request_that_is_given_up_is_aborted_where_it_waits(place: Any, trainer: Any, sampler: Any) -> None:
    async def work(runtime: Any) -> None:
        role, backend = await runtime.train(trainer()), await runtime.serve(sampler(delay=600.0))
        await sync(role, backend, 1)
        request = ask(0)
        task = asyncio.ensure_future(backend.generate(request))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await backend.abort(request)
        await backend.abort(request)  # one that is not there is ignored
        assert backend.idle

    place(work)
