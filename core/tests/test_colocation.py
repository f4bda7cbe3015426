"""Roles that share devices take turns: what a run calls, in its order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from turnwise.config import load
from turnwise.config.convert import to_plain
from turnwise.contracts.train import Offer
from turnwise.pipeline.colocation import Colocation
from turnwise.pipeline.roles import Roles
from turnwise.pipeline.run import Pipeline
from turnwise.pipeline.weights import WeightSync
from turnwise.testing.fake_model import FakeBackend, FakeStrategy
from turnwise.testing.synthetic import training_rows

Toy = Callable[..., Path]
PLAIN: dict[str, Any] = {
    "track_with": ["jsonl"],
    "eval_steps": 0,
    "val_env_manager": None,
    "max_steps": 1,
    "render_save_dir": None,
}


def calls(toy: Toy, monkeypatch: pytest.MonkeyPatch, train: list[int], infer: list[int], **changes: Any) -> list[str]:
    """What happens to the roles in one step of a run, a name and a method each."""
    seen: list[str] = []

    def watch(cls: type, method: str, name_of: Callable[[Any], str]) -> None:
        before = getattr(cls, method)

        if asyncio.iscoroutinefunction(before):

            async def called(self: Any, *args: Any) -> Any:
                seen.append(f"{name_of(self)}.{method}" + (f"({args[0]})" if method == "wake" else ""))
                return await before(self, *args)
        else:

            def called(self: Any, *args: Any) -> Any:
                seen.append(f"{name_of(self)}.{method}")
                return before(self, *args)

        monkeypatch.setattr(cls, method, called)

    for method in ("offload", "onload", "update", "logprobs", "offer", "save"):
        watch(FakeStrategy, method, lambda self: str(self._context.role))
    for method in ("sleep", "wake", "receive"):
        watch(FakeBackend, method, lambda self: "actor_infer")
    roles = {
        "actor_train": {
            "device_mapping": train,
            "strategy_args": {"strategy_name": "fake"},
            "model_args": {"dtype": "fp32"},
        },
        "actor_infer": {
            "device_mapping": infer,
            "strategy_args": {"strategy_name": "fake"},
            "model_args": {"dtype": "bf16"},
            "generating_args": {"max_new_tokens": 8},
        },
    }
    loaded = load(toy(**PLAIN, **(roles | changes)), ["runtime=local"])
    asyncio.run(Pipeline(loaded.config, Path(), to_plain(loaded.config)).run())
    return seen


def test_roles_on_devices_of_their_own_are_never_moved(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(toy, monkeypatch, train=[0], infer=[1])
    assert not [call for call in seen if call.split(".")[1] in ("offload", "onload", "sleep", "wake")]


def test_on_one_device_the_sampler_sleeps_while_the_trainer_is_there(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(toy, monkeypatch, train=[0, 1], infer=[1])
    without_updates = [call for call in seen if not call.endswith((".update", ".logprobs"))]
    assert without_updates == [
        *("actor_train.offload", "actor_infer.sleep", "actor_train.onload"),  # an engine starts alone
        *(
            "actor_infer.wake(weights)",
            "actor_train.offer",
            "actor_infer.receive",
        ),  # the first weights, before the first rollout
        *("actor_train.offload", "actor_infer.wake(cache)"),
        *("actor_infer.sleep", "actor_train.onload"),  # training
        *("actor_infer.wake(weights)", "actor_train.offer", "actor_infer.receive"),  # the new weights
        *("actor_train.offload", "actor_infer.wake(cache)"),
        *("actor_infer.sleep", "actor_train.onload", "actor_train.save", "actor_train.offload"),  # the last checkpoint
        *("actor_infer.wake(weights)", "actor_infer.wake(cache)"),
    ]
    updates = [i for i, call in enumerate(seen) if call == "actor_train.update"]
    assert updates
    trained = [i for i, call in enumerate(seen) if call == "actor_train.onload"][1]
    assert all(trained < i < seen.index("actor_infer.wake(weights)", trained) for i in updates)


def test_a_reference_on_the_actors_device_takes_turns_with_it(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(toy, monkeypatch, train=[0], infer=[], kl_loss_coef=0.1)
    at = seen.index("reference.logprobs")
    assert seen[at - 2 : at + 3] == [
        "actor_train.offload",
        "reference.onload",
        "reference.logprobs",
        "reference.offload",
        "actor_train.onload",
    ]
    assert "actor_infer.sleep" not in seen


class Device:
    """The memory of one GPU. What may be there together is asserted at every change."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        self.states: list[set[str]] = []

    def change(self, come: set[str], go: set[str]) -> None:
        self.here = (self.here | come) - go
        self.states.append(set(self.here))
        trainers = self.here & {"actor_train", "reference", "critic"}
        assert len(trainers) < 2, f"{trainers} on one device"
        assert not (trainers and "cache" in self.here), f"{trainers} beside the KV cache"


class OnDevice:
    """A training role on it."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        device.change({name}, set())

    async def onload(self) -> None:
        self.device.change({self.name}, set())

    async def offload(self) -> None:
        self.device.change(set(), {self.name})

    async def offer(self, transport: str, version: int, receivers: int) -> Offer:
        assert self.name in self.device.here, "weights are sent from where they are"
        return Offer(transport, version)

    async def send(self, offer: Offer) -> None:
        pass

    async def logprobs(self, rows: Any) -> Any:
        assert self.name in self.device.here
        return rows

    values = logprobs


class SamplerOnDevice:
    """An engine on it, which starts at the first pause. With `model` it has none of its own, and samples with that of
    the role."""

    def __init__(self, device: Device, model: str = "") -> None:
        self.device, self.model, self.started, self.paused = device, model, False, False

    async def pause(self) -> None:
        self.paused = True
        if not self.started and not self.model:
            self.device.change({"weights", "cache"}, set())
        self.started = True

    async def resume(self) -> None:
        self.paused = False
        self.sample()

    def sample(self) -> None:
        assert not self.paused
        assert self.device.here == ({self.model} if self.model else {"weights", "cache"}), (
            "it samples on its device, alone"
        )

    async def sleep(self) -> None:
        assert not self.model
        self.device.change(set(), {"weights", "cache"})

    async def wake(self, what: str) -> None:
        self.device.change({what}, set())

    def receivers(self, transport: str) -> int:
        return 1

    async def receive(self, offer: Offer) -> int:
        assert self.model or "weights" in self.device.here
        return offer.version


@pytest.mark.parametrize("one_model", [False, True])
def test_trainers_and_the_cache_are_never_on_a_device_together(toy: Toy, one_model: bool) -> None:
    """Else the engine's share would be bounded by the trainer's state; and a model that is shared is where the sampler
    reads it."""
    config = load(
        toy(**PLAIN), ["actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0]", "kl_loss_coef=0.1"]
    ).config
    config = evolve(config, critic=config.actor_train)
    device = Device()

    async def run() -> None:
        actor: Any = OnDevice(device, "actor_train")
        backend: Any = SamplerOnDevice(device, "actor_train" if one_model else "")
        colocation = Colocation(config, {"actor_train": actor}, backend, one_model=one_model)
        second: dict[str, Any] = {}
        for name in ("reference", "critic"):  # as they are built
            await colocation.make_room(name)
            second[name] = OnDevice(device, name)
            colocation.add(name, second[name])
        roles = Roles(backend, actor, backend, second["reference"], True, second["critic"], "any", colocation)
        sync = WeightSync(config, roles)
        await sync.publish(0)
        for version in (1, 2):
            backend.sample()
            await colocation.sleep()
            for answer in (roles.logprobs, roles.reference_logprobs, roles.values, roles.logprobs):
                await answer(training_rows())
            await sync.publish(version)
        backend.sample()
        await colocation.sleep()
        for name in ("actor_train", "critic"):  # a checkpoint
            await colocation.bring(name)
        await colocation.sampling()
        backend.sample()

    asyncio.run(run())
    assert one_model or {"actor_train", "weights"} in device.states, "the weights are there for the update"
