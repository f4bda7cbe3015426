"""What every runtime keeps: a placed role is whole and answers, its exceptions arrive, and everything closes. It is
tested with the fake roles."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import numpy as np
import pytest

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.contracts.rollout import RolloutSettings
from turnwise.contracts.runtime import Runtime, RuntimeCapabilities, RuntimeContext, ServePlan, TrainPlan, TrainRole
from turnwise.contracts.train import TrainContext
from turnwise.data.rows import Update
from turnwise.errors import CheckpointError, TrainerError
from turnwise.testing.fake_model import initial_weights, save_model
from turnwise.testing.fakes import FakeBackendConfig, FakeChat, FakeStrategy
from turnwise.testing.subject import Subject
from turnwise.testing.synthetic import training_rows

KIND = "runtime"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a fake model."""
    save_model(tmp_path / "model", initial_weights())
    return tmp_path / "model"


def build(implementation: Subject) -> Runtime:
    """The runtime with its context, or one of a minute's patience."""
    runtime: Runtime = implementation.build(implementation.supplied.get("context", RuntimeContext(timeout=60.0)))
    return runtime


def trainer(model: Path, trainable: bool = True) -> TrainPlan:
    """A plan for the fake strategy."""
    return TrainPlan("actor_train", "fake_strategy", None, TrainContext(model, "actor_train", trainable=trainable))


def test_a_placed_strategy_answers_as_the_strategy_itself(
    implementation: Subject, runner: asyncio.Runner, model: Path
) -> None:
    """Wherever it runs."""
    runtime, plan, rows = build(implementation), trainer(model), training_rows()
    assert isinstance(implementation.capabilities(RuntimeCapabilities), RuntimeCapabilities)
    role = runner.run(runtime.train(plan))
    direct = FakeStrategy(None, plan.context)
    np.testing.assert_array_equal(runner.run(role.logprobs(rows)), direct.logprobs(rows))
    placed, local = runner.run(role.update(Update(rows, 0.5))), direct.update(Update(rows, 0.5))
    assert (placed.loss, placed.grad_norm) == (local.loss, local.grad_norm)
    np.testing.assert_array_equal(runner.run(role.logprobs(rows)), direct.logprobs(rows))
    runner.run(runtime.close())


def test_a_placed_strategy_has_every_method_of_a_training_role(
    implementation: Subject, runner: asyncio.Runner, model: Path
) -> None:
    """The pipeline has one code path."""
    runtime = build(implementation)
    role = runner.run(runtime.train(trainer(model)))
    # From the contract itself, so that a method that it gains is asked for here, too.
    declared = [name for name, member in vars(TrainRole).items() if inspect.iscoroutinefunction(member)]
    missing = [name for name in declared if not inspect.iscoroutinefunction(getattr(role, name, None))]
    assert not missing, f"turnwise.contracts.runtime.TrainRole has also {', '.join(missing)}, each a coroutine."
    runner.run(runtime.close())


def test_what_a_role_saved_is_there_again(
    implementation: Subject, runner: asyncio.Runner, model: Path, tmp_path: Path
) -> None:
    """After an update that came between."""
    runtime, rows, folder = build(implementation), training_rows(), tmp_path / "saved"
    folder.mkdir()
    role = runner.run(runtime.train(trainer(model)))
    before = runner.run(role.logprobs(rows))
    runner.run(role.save(folder))
    runner.run(role.update(Update(rows, 0.5)))
    runner.run(role.load(folder))
    np.testing.assert_array_equal(runner.run(role.logprobs(rows)), before)
    runner.run(runtime.close())


def test_the_watch_of_a_living_role_does_not_end(implementation: Subject, runner: asyncio.Runner, model: Path) -> None:
    """Its end is the death of the role."""
    runtime = build(implementation)
    role = runner.run(runtime.train(trainer(model)))

    async def watch() -> bool:
        watching = asyncio.ensure_future(role.watch())
        await asyncio.wait([watching], timeout=0.2)
        ended = watching.done()
        watching.cancel()
        return ended

    assert not runner.run(watch()), "watch ends only with the error that the role is gone."
    runner.run(runtime.close())


def test_episodes_have_an_executor_or_none(implementation: Subject, runner: asyncio.Runner, model: Path) -> None:
    """Workers of the runtime's own, or the driver's process."""
    runtime = build(implementation)
    plan = ServePlan("actor_infer", "fake_backend", FakeBackendConfig(), InferenceContext(model, FakeChat()))
    executor = runtime.executor((), RolloutSettings(seed=1), FakeChat(), runner.run(runtime.serve(plan)))
    assert executor is None or executor.workers > 0, "an executor has workers; None: the driver plays."
    if executor is not None:
        runner.run(executor.close())
    runner.run(runtime.close())


def test_calls_of_two_roles_do_not_meet(implementation: Subject, runner: asyncio.Runner, model: Path) -> None:
    """An update of one leaves the other as it was."""
    runtime, rows = build(implementation), training_rows()
    first, second = (runner.run(runtime.train(trainer(model))) for _ in range(2))
    before = runner.run(second.logprobs(rows))
    runner.run(first.update(Update(rows, 0.5)))
    np.testing.assert_array_equal(runner.run(second.logprobs(rows)), before)
    runner.run(runtime.close())


def test_the_exception_of_a_role_arrives_where_it_was_called(
    implementation: Subject, runner: asyncio.Runner, model: Path, tmp_path: Path
) -> None:
    """With its type; the role serves on."""
    runtime = build(implementation)
    role = runner.run(runtime.train(trainer(model, trainable=False)))
    with pytest.raises(TrainerError, match="frozen"):
        runner.run(role.update(Update(training_rows(), 0.5)))
    with pytest.raises(CheckpointError):
        runner.run(role.load(tmp_path / "nothing"))
    # An exception of a call is the caller's: the process must serve on.
    assert len(runner.run(role.logprobs(training_rows()))) > 0, "the role is lost after an exception."
    runner.run(runtime.close())


def test_a_role_that_cannot_be_built_is_reported_at_once(
    implementation: Subject, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """And not at its first call."""
    runtime = build(implementation)
    with pytest.raises(CheckpointError):
        runner.run(runtime.train(trainer(tmp_path / "nothing")))
    runner.run(runtime.close())


def test_a_placed_backend_is_a_backend(implementation: Subject, runner: asyncio.Runner, model: Path) -> None:
    """As in a run: it gets its first weights before the first request."""
    runtime = build(implementation)
    role = runner.run(runtime.train(trainer(model)))
    plan = ServePlan("actor_infer", "fake_backend", FakeBackendConfig(), InferenceContext(model, FakeChat()))
    backend = runner.run(runtime.serve(plan))
    assert backend.input == "ids"
    offer = runner.run(role.offer("fake", 1, backend.receivers("fake")))
    runner.run(backend.pause())

    async def update() -> int:
        _, version = await asyncio.gather(role.send(offer), backend.receive(offer))
        return int(version)

    assert runner.run(update()) == 1, "the version of the weights that now serve."
    runner.run(backend.resume())
    request = Request(1, GeneratingArgs(), 4, ids=FakeChat().render([{"role": "user", "content": "x"}]))
    answer, again = runner.run(backend.generate(request)), runner.run(backend.generate(request))
    assert answer.ids is not None and answer.versions is not None
    np.testing.assert_array_equal(answer.ids, again.ids)
    assert set(answer.versions) == {1}
    runner.run(backend.sleep())
    runner.run(backend.wake("weights"))
    runner.run(backend.wake("cache"))
    runner.run(runtime.close())


def test_roles_and_the_runtime_close_twice(implementation: Subject, runner: asyncio.Runner, model: Path) -> None:
    """As a run does that ends early."""
    runtime = build(implementation)
    role = runner.run(runtime.train(trainer(model)))
    for _ in range(2):
        runner.run(role.close())
    for _ in range(2):
        runner.run(runtime.close())
