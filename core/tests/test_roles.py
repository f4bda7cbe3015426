"""What a run places, in which order, and who answers for the reference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve

from turnwise.config import load
from turnwise.contracts.runtime import RuntimeContext, ServePlan, TrainPlan
from turnwise.pipeline.colocation import Colocation
from turnwise.pipeline.roles import Roles, place
from turnwise.testing.fake_runtime import FakeRuntime, FakeRuntimeConfig
from turnwise.testing.synthetic import training_rows

Toy = Callable[..., Path]
ROLE = {
    "training_args": {"learning_rate": 1.0, "per_device_train_batch_size": 2},
    "strategy_args": {"strategy_name": "fake"},
}


class Placing(FakeRuntime):
    """Notes which roles are asked for."""

    def __init__(self) -> None:
        super().__init__(FakeRuntimeConfig(), RuntimeContext())
        self.asked: list[str] = []

    async def train(self, plan: TrainPlan) -> Any:
        self.asked.append(plan.role)
        return await super().train(plan)

    async def serve(self, plan: ServePlan) -> Any:
        self.asked.append(plan.role)
        return await super().serve(plan)


def placed(toy: Toy, values: bool = False, **changes: Any) -> tuple[Roles, list[str]]:
    config, runtime = load(toy(runtime="fake", **changes)).config, Placing()
    config = evolve(config, critic=config.actor_train)  # which the loader leaves out where the estimator needs none
    return asyncio.run(place(config, Path(), runtime, critic=values)), runtime.asked


def test_a_plain_run_places_trainer_and_sampler(toy: Toy) -> None:
    roles, asked = placed(toy)
    assert asked == ["actor_train", "actor_infer"]
    assert (roles.reference, roles.critic, roles.has_reference) == (None, None, False)
    assert list(roles.with_state) == ["actor_train"]
    assert roles.watched == [roles.actor]
    assert roles.transport == "fake"


def test_all_roles_are_placed_in_their_order_and_those_with_a_state_are_saved(toy: Toy) -> None:
    roles, asked = placed(toy, values=True, kl_loss_coef=0.1)
    assert asked == ["actor_train", "actor_infer", "reference", "critic"]
    assert list(roles.with_state) == ["actor_train", "critic"]
    assert roles.watched == [roles.actor, roles.reference, roles.critic]


def test_with_adapters_the_actor_is_its_own_reference(toy: Toy) -> None:
    roles, asked = placed(toy, kl_loss_coef=0.1, actor_train=ROLE | {"model_args": {"lora_rank": 4}})
    assert asked == ["actor_train", "actor_infer"]
    assert roles.has_reference
    assert roles.watched == [roles.actor]


class WithoutAdapters:
    """Moves of one role, and which of its log-probs are asked for."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def logprobs(self, rows: Any) -> np.ndarray:
        self.seen.append("logprobs")
        return np.zeros(1, np.float32)

    async def base_logprobs(self, rows: Any) -> np.ndarray:
        self.seen.append("base_logprobs")
        return np.ones(1, np.float32)

    values = logprobs

    async def onload(self) -> None:
        self.seen.append("onload")

    async def offload(self) -> None:
        self.seen.append("offload")


def test_the_reference_answers_on_its_devices_and_an_actor_without_its_adapters_where_it_is(toy: Toy) -> None:
    shared = {"device_mapping": [0]}
    config = load(toy(kl_loss_coef=0.1, actor_train=ROLE | shared, reference=ROLE | shared)).config
    config = evolve(config, critic=evolve(config.actor_train, device_mapping=(1,)))
    actor, reference, critic, rows = WithoutAdapters(), WithoutAdapters(), WithoutAdapters(), training_rows()

    def roles(other: Any) -> Roles:
        training: Any = {"actor_train": actor, "critic": critic} | ({"reference": other} if other else {})
        backend: Any = None
        colocation = Colocation(config, training, backend)
        return Roles(backend, actor, backend, other, True, critic, "fake", colocation)  # type: ignore[arg-type]

    assert asyncio.run(roles(reference).reference_logprobs(rows)) == 0
    assert (actor.seen, reference.seen) == (["offload"], ["logprobs"])  # it stays until another needs the place
    assert asyncio.run(roles(None).reference_logprobs(rows)) == 1
    assert actor.seen == ["offload", "base_logprobs"]
    assert asyncio.run(roles(reference).values(rows)) == 0
    assert critic.seen == ["logprobs"]  # it has devices of its own, and stays there
