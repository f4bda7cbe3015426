"""Training roles in many processes: rows dealt and answers merged, and every way in which a rank can fail."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="ray is not installed")

from turnwise.contracts.train import Ranks, TrainContext
from turnwise.data.rows import Update
from turnwise.errors import MachineError, TrainerError
from turnwise.testing.fakes import FakeStrategy
from turnwise.testing.synthetic import training_rows

FAKES = str(Path(__file__).with_name("ray_fakes.py"))

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("cluster"), pytest.mark.filterwarnings("ignore")]


def test_rows_are_dealt_to_data_parallel_ranks_and_answers_come_back_in_order(
    place: Any, trainer: Any, model: Path, tmp_path: Path
) -> None:
    rows = training_rows()
    alone = FakeStrategy(None, TrainContext(model, "actor_train"))

    async def work(runtime: Any) -> None:
        role = await runtime.train(trainer((0, 1), environment={"MARK": "set", "OMP_NUM_THREADS": "3"}))
        np.testing.assert_array_equal(await role.logprobs(rows), alone.logprobs(rows))
        result = await role.update(Update(rows, 0.0))
        expected = alone.update(Update(rows, 0.0))
        assert result.loss == pytest.approx(expected.loss)  # Σ over the ranks of what each had of it
        assert result.sums.keys() == expected.sums.keys()
        for name, (x, w) in expected.sums.items():
            assert result.sums[name] == pytest.approx((x, w))
        facts = await role.each("facts")
        assert (facts["ranks"].rank, facts["ranks"].size, facts["devices"]) == (0, 2, ())
        assert (facts["MARK"], facts["RANK"], facts["WORLD_SIZE"], facts["OMP_NUM_THREADS"]) == ("set", "0", "2", "3")
        assert facts["ranks"].address == f"127.0.0.1:{facts['MASTER_PORT']}"
        assert facts["cwd"] == str(tmp_path)
        await role.each("write", Path())
        reported = [(tmp_path / f"{rank}.txt").read_text().split() for rank in (0, 1)]
        assert [t[0] for t in reported] == ["0", "1"]  # local ranks
        assert sum(int(t[1]) for t in reported) == len(rows)
        assert all(int(t[1]) < len(rows) for t in reported)
        assert reported[0][2] != reported[1][2]

    place(work)


def test_ranks_of_one_data_parallel_rank_get_the_same_rows(
    place: Any, trainer: Any, model: Path, tmp_path: Path
) -> None:
    rows = training_rows()
    alone = FakeStrategy(None, TrainContext(model, "actor_train"))

    async def work(runtime: Any) -> None:
        role = await runtime.train(trainer((0, 1), model_parallel=2))
        np.testing.assert_array_equal(await role.logprobs(rows), alone.logprobs(rows))
        assert (await role.update(Update(rows, 0.0))).loss == pytest.approx(alone.update(Update(rows, 0.0)).loss)
        await role.each("write", Path())
        assert [(tmp_path / f"{rank}.txt").read_text().split()[1] for rank in (0, 1)] == [str(len(rows))] * 2

    place(work)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("fail", ["out of chalk. Fix: buy chalk"]),
        pytest.param("odd", ["raised KeyError: 'odd'"], marks=pytest.mark.matrix),
        ("die", ["the process died in misbehave", "SIGKILL"]),
    ],
)
def test_the_failure_of_one_rank_is_reported_with_its_name_and_cause(
    place: Any, trainer: Any, what: str, words: list[str]
) -> None:
    async def work(runtime: Any) -> tuple[str, float]:
        role = await runtime.train(trainer((0, 1)))
        began = time.monotonic()
        with pytest.raises(TrainerError) as caught:
            await role.each("misbehave", what, 1)
        took = time.monotonic() - began
        if what == "die":
            with pytest.raises(TrainerError, match="died in misbehave"):  # the role is lost, and says why
                await role.logprobs(training_rows())
        else:
            assert len(await role.logprobs(training_rows())) > 0
        return str(caught.value), took

    text, took = place(work)
    assert text.startswith("actor_train, rank 1 of 2 on ")
    assert "\n" not in text
    for word in words[:1]:
        assert word in text
    assert took < 30


def test_the_end_of_a_rank_that_nobody_asks_is_noticed(place: Any, trainer: Any, tmp_path: Path) -> None:
    async def work(runtime: Any) -> str:
        role = await runtime.train(trainer((0, 1)))
        watch = asyncio.ensure_future(role.watch())
        await role.each("write", Path())
        assert not watch.done()
        os.kill(int((tmp_path / "1.txt").read_text().split()[2]), signal.SIGKILL)
        with pytest.raises(TrainerError) as caught:
            await asyncio.wait_for(watch, 30)
        with pytest.raises(TrainerError, match="rank 1 of 2"):  # the role is lost, and says why
            await role.each("write", Path())
        return str(caught.value)

    text = place(work)
    assert text.startswith("actor_train, rank 1 of 2 on ")
    assert "the process died" in text


def test_a_call_past_the_timeout_names_the_ranks_that_did_not_answer(place: Any, trainer: Any) -> None:
    async def work(runtime: Any) -> None:
        role = await runtime.train(trainer((0, 1)))
        # Of this call alone: ranks on a busy machine take longer than that to come up.
        role._timeout = 3.0
        with pytest.raises(
            TrainerError,
            match=r"actor_train: misbehave did not end within runtime_timeout = 3 s \(rank 0 of 2 .*; rank 1 of 2 ",
        ):
            await role.each("misbehave", "hang", 1)

    place(work)


def test_what_a_rank_logs_in_a_long_call_is_reported_before_its_end(
    place: Any, trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "turnwise")

    async def work(runtime: Any) -> None:
        role = await runtime.train(trainer((0, 1)))
        call = asyncio.ensure_future(role.each("misbehave", "talk", 1))
        end = time.monotonic() + 20
        while (
            not (reported := [r for r in caplog.records if "the chalk squeaks" in r.getMessage()])
            and time.monotonic() < end
        ):
            await asyncio.sleep(0.1)
        assert not call.done()
        call.cancel()
        await asyncio.wait([call])
        assert [(r.levelname, re.sub(r"on \S+:", "on HOST:", r.getMessage())) for r in reported] == [
            ("INFO", "actor_train, rank 1 of 2 on HOST: the chalk squeaks")
        ]

    place(work)


def test_a_cluster_without_gpus_is_reported_before_anything_is_built(place: Any, trainer: Any) -> None:
    async def work(runtime: Any) -> None:
        with pytest.raises(MachineError, match="actor_train: device_mapping needs 2 GPUs, the cluster has none"):
            await runtime.train(trainer((0, 1)))

    for device in ("auto", "gpu"):
        place(work, device=device)


def test_roles_of_one_device_share_its_place(place: Any, trainer: Any, sampler: Any) -> None:
    async def work(runtime: Any) -> None:
        await runtime.train(trainer((0,)))
        await runtime.serve(sampler((0, 1)))
        from ray.util import placement_group_table

        groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        assert sorted((group["name"], len(group["bundles"])) for group in groups) == [
            ("actor_infer", 1),
            ("actor_train", 1),
        ]

    place(work)


@pytest.mark.parametrize(("devices", "expected"), [((0,), "0"), ((), "1")])
def test_a_rank_that_sees_one_gpu_gets_the_number_0(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, devices: tuple[int, ...], expected: str
) -> None:
    """Engines read the device's number in LOCAL_RANK, and a rank sees its own GPU alone; without one it is the place
    among the node's ranks."""
    from turnwise.plugins import registry
    from turnwise_ray.actors import Home, packed
    from turnwise_ray.trainer import TrainRank

    plugins = ("turnwise.testing.plugin", FAKES)
    registry().declare(plugins)

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(logging.getLogger("turnwise"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("turnwise"), "propagate", True)
    rank = TrainRank("rank")
    home = Home(os.getcwd(), plugins, ".")
    rank.start(home, packed(trainer()), Ranks(1, 2, 1, "127.0.0.1:1"), devices).unwrap("rank", TrainerError)
    assert rank.call(True, "facts").value["LOCAL_RANK"] == expected
