"""One cluster for the tests of a module, and the small roles that they place."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from turnwise.config.schema import Choice
from turnwise.contracts.env_manager import Limits, ManagerContext
from turnwise.contracts.inference import InferenceContext
from turnwise.contracts.rollout import TagPlan
from turnwise.contracts.runtime import RuntimeContext, ServePlan, TrainPlan
from turnwise.contracts.train import TrainContext
from turnwise.planning.builders import EnvironmentBuilder, ManagerBuilder
from turnwise.plugins import reset_registry
from turnwise.testing.fake_model import FakeChat, initial_weights, save_model
from turnwise.testing.fakes import FakeEnvManager

FAKES = str(Path(__file__).with_name("ray_fakes.py"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of this machine, as the runtime would start one."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    from turnwise_ray.cluster import SEAT, SEATS

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        resources={SEAT: SEATS},
        object_store_memory=100 * 2**20,
    )
    yield
    ray.shutdown()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a fake model."""
    save_model(tmp_path / "model", initial_weights())
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def fresh_registry() -> Iterator[None]:
    """What a test declares is gone after it."""
    reset_registry()
    yield
    reset_registry()


@pytest.fixture
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`place(work, timeout=, **config)`: run `work(runtime)` with a runtime on CPU processes, in a folder of its own,
    and close it."""
    from turnwise.plugins import registry
    from turnwise_ray.config import RayConfig
    from turnwise_ray.runtime import RayRuntime

    monkeypatch.chdir(tmp_path)
    registry().declare(["turnwise.testing.plugin", FAKES])

    def run(work: Callable[[Any], Coroutine[Any, Any, Any]], timeout: float = 60.0, **config: Any) -> Any:
        async def whole() -> Any:
            runtime = RayRuntime(
                RayConfig(**{"device": "cpu", "start_timeout": 120, **config}),
                RuntimeContext(timeout, plugins=("turnwise.testing.plugin", FAKES)),
            )
            try:
                return await work(runtime)
            finally:
                await runtime.close()
                await runtime.close()

        return asyncio.run(whole())

    return run


@pytest.fixture
def trainer(model: Path) -> Callable[..., TrainPlan]:
    """`trainer(devices, **options)`: a plan of the strategy `ranked`."""

    def plan(devices: tuple[int, ...] = (), environment: dict[str, str] | None = None, **options: Any) -> TrainPlan:
        from turnwise.plugins import registry

        config = registry().find("train_strategy", "ranked").config_class()(**options)  # type: ignore[misc]
        return TrainPlan(
            "actor_train", "ranked", config, TrainContext(model, "actor_train"), devices, environment or {}
        )

    return plan


@pytest.fixture
def sampler(model: Path) -> Callable[..., ServePlan]:
    """`sampler(devices, name=)`: a plan of the backend `mortal`, or another."""

    def plan(
        devices: tuple[int, ...] = (), environment: dict[str, str] | None = None, name: str = "mortal", **options: Any
    ) -> ServePlan:
        from turnwise.testing.fakes import FakeBackendConfig

        context = InferenceContext(model, FakeChat(), weight_sync_timeout=30)
        return ServePlan("actor_infer", name, FakeBackendConfig(**options), context, devices, environment or {})

    return plan


@pytest.fixture
def plan() -> Callable[..., TagPlan]:
    """`plan(environment, **options)`: a tag that every worker can build, 4 groups of 3 episodes of 3 turns."""
    known = ("turnwise.testing.plugin", FAKES)

    def made(environment: str = "fake_env", **options: Any) -> TagPlan:
        return TagPlan(
            tag="Count",
            build=EnvironmentBuilder(environment, options, plugins=known),
            manager=FakeEnvManager(None, ManagerContext()),
            manager_builder=ManagerBuilder(
                Choice("fake_manager"), ManagerContext(tag="Count", max_turns=3), plugins=known
            ),
            limits=Limits(sequence_length=128, max_new_tokens=4, max_tokens_per_step=4, max_turns=3),
            groups=4,
            group_size=3,
            step="inline",
        )

    return made


@pytest.fixture
def prepared(trainer: Callable[..., TrainPlan], sampler: Callable[..., ServePlan]) -> Callable[..., Any]:
    """`prepared(runtime, **options)`: a backend of one engine `mortal` with the weights of version 1."""

    async def made(runtime: Any, **options: Any) -> Any:
        role, backend = await runtime.train(trainer()), await runtime.serve(sampler(**options))
        offer = await role.offer("fake", 1, backend.receivers("fake"))
        await asyncio.gather(role.send(offer), backend.receive(offer))
        return backend

    return made
