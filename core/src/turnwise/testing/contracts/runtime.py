"""What every runtime keeps: a placed role answers, its exceptions arrive, and everything closes. It is tested with the fake roles."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request, receivers
from turnwise.contracts.runtime import RolePlan, RuntimeContext
from turnwise.contracts.train import TrainContext
from turnwise.data.rows import Update
from turnwise.errors import CheckpointError, TrainerError
from turnwise.testing.fake_model import initial_weights, save_model
from turnwise.testing.fakes import FakeBackend, FakeBackendConfig, FakeChat, FakeStrategy
from turnwise.testing.subject import Subject
from turnwise.testing.synthetic import training_rows

KIND = "runtime"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a fake model."""
    save_model(tmp_path / "model", initial_weights())
    return tmp_path / "model"


def build(implementation: Subject) -> Any:
    return implementation.build(implementation.supplied.get("context", RuntimeContext(timeout=60.0)))


def trainer(model: Path, trainable: bool = True) -> RolePlan:
    return RolePlan("actor_train", "train_strategy", "fake_strategy", None, TrainContext(model, "actor_train", trainable=trainable))


def test_a_placed_strategy_answers_as_the_strategy_itself(implementation: Subject, runner: asyncio.Runner, model: Path) -> None:
    runtime, plan, rows = build(implementation), trainer(model), training_rows()
    assert isinstance(runtime.one_process, bool), "one_process must say whether all roles live in the driver's process."
    handle = runner.run(runtime.place(plan))
    assert handle.transports == FakeStrategy.transports, "the handle must tell the weight transports of its role."
    direct = FakeStrategy(None, plan.context)
    np.testing.assert_array_equal(runner.run(handle.call("logprobs", rows)), direct.logprobs(rows))
    placed, local = runner.run(handle.call("update", Update(rows, 0.5))), direct.update(Update(rows, 0.5))
    assert (placed.loss, placed.grad_norm) == (local.loss, local.grad_norm)
    np.testing.assert_array_equal(runner.run(handle.call("logprobs", rows)), direct.logprobs(rows))
    runner.run(runtime.close())


def test_calls_of_two_roles_do_not_meet(implementation: Subject, runner: asyncio.Runner, model: Path) -> None:
    runtime, rows = build(implementation), training_rows()
    first, second = (runner.run(runtime.place(trainer(model))) for _ in range(2))
    before = runner.run(second.call("logprobs", rows))
    runner.run(first.call("update", Update(rows, 0.5)))
    np.testing.assert_array_equal(runner.run(second.call("logprobs", rows)), before)
    runner.run(runtime.close())


def test_the_exception_of_a_role_arrives_where_it_was_called(implementation: Subject, runner: asyncio.Runner, model: Path, tmp_path: Path) -> None:
    runtime = build(implementation)
    handle = runner.run(runtime.place(trainer(model, trainable=False)))
    with pytest.raises(TrainerError, match="frozen"):
        runner.run(handle.call("update", Update(training_rows(), 0.5)))
    with pytest.raises(CheckpointError):
        runner.run(handle.call("load", tmp_path / "nothing"))
    assert len(runner.run(handle.call("logprobs", training_rows()))) > 0, "the role is lost after an exception."
    runner.run(runtime.close())


def test_a_role_that_cannot_be_built_is_told_at_once(implementation: Subject, runner: asyncio.Runner, tmp_path: Path) -> None:
    runtime = build(implementation)
    with pytest.raises(CheckpointError):
        runner.run(runtime.place(trainer(tmp_path / "nothing")))
    runner.run(runtime.close())


def test_a_placed_backend_is_a_backend(implementation: Subject, runner: asyncio.Runner, model: Path) -> None:
    """As in a run: it gets its first weights before the first request."""
    runtime = build(implementation)
    handle = runner.run(runtime.place(trainer(model)))
    plan = RolePlan("actor_infer", "inference_backend", "fake_backend", FakeBackendConfig(), InferenceContext(model, FakeChat()))
    backend = runner.run(runtime.place(plan))
    assert backend.input == "ids"
    assert tuple(backend.transports) == FakeBackend.transports
    offer = runner.run(handle.call("offer", "fake", 1, receivers(backend, "fake")))
    runner.run(backend.pause())

    async def update() -> int:
        _, version = await asyncio.gather(handle.call("send", offer), backend.receive(offer))
        return int(version)

    assert runner.run(update()) == 1, "the version of the weights that now serve."
    runner.run(backend.resume())
    request = Request(1, GeneratingArgs(), 4, ids=FakeChat().render([{"role": "user", "content": "x"}]))
    answer, again = runner.run(backend.generate(request)), runner.run(backend.generate(request))
    assert answer.ids is not None
    np.testing.assert_array_equal(answer.ids, again.ids)
    assert set(answer.versions) == {1}
    for method in ("sleep", "wake"):
        runner.run(getattr(backend, method)())
    runner.run(runtime.close())


def test_handles_and_the_runtime_close_twice(implementation: Subject, runner: asyncio.Runner, model: Path) -> None:
    runtime = build(implementation)
    handle = runner.run(runtime.place(trainer(model)))
    for _ in range(2):
        runner.run(handle.close())
    for _ in range(2):
        runner.run(runtime.close())
