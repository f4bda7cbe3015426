"""Which way weights go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from turnwise.config.schema import Choice, ModelArgs, Role
from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.contracts.train import Offer
from turnwise.errors import ConfigError, EngineError, OutOfMemory, TrainerError
from turnwise.pipeline import weights
from turnwise.pipeline.colocation import Colocation
from turnwise.pipeline.roles import Roles
from turnwise.pipeline.weights import WeightSync, deliver, update
from turnwise.planning.transport import choose
from turnwise.plugins import registry
from turnwise.testing.fakes import FakeBackend, FakeRuntime, FakeStrategy
from turnwise.testing.runs import one_step

ON_GPUS = ("process_group", "shared_memory", "safetensors")


@pytest.fixture
def choose_among(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The choice for a run of the fakes that offer and take these transports."""

    def choice(
        offered: tuple[str, ...] = ("shared", "shared_memory", "process_group", "safetensors"),
        taken: tuple[str, ...] = ON_GPUS,
        devices: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
        dtypes: tuple[Any, Any] = ("bf16", "bf16"),
        one_process: bool = True,
        ratio: int = 0,
    ) -> str:
        monkeypatch.setattr(FakeStrategy, "transports", staticmethod(lambda config, context: offered))
        monkeypatch.setattr(FakeBackend, "transports", staticmethod(lambda config, context: taken))
        monkeypatch.setattr(FakeRuntime, "capabilities", RuntimeCapabilities(one_process=one_process))
        train, infer = (
            Role(strategy_args=Choice(name), model_args=ModelArgs(dtype=dtype), device_mapping=own)
            for name, dtype, own in zip(("fake_strategy", "fake_backend"), dtypes, devices, strict=True)
        )
        return choose(
            one_step(
                actor_train=train,
                actor_infer=infer,
                runtime=Choice("fake_runtime"),
                async_generation_ratio=ratio,
            )
        )

    registry().declare(["turnwise.testing.plugin"])
    return choice


def test_the_backends_best_that_the_trainer_offers(choose_among: Callable[..., str]) -> None:
    assert choose_among(devices=((0,), (1,)), one_process=False) == "process_group"
    assert choose_among(("safetensors",), devices=((0,), (1,)), one_process=False) == "safetensors"


def test_roles_on_one_device_do_not_meet_in_a_process_group(choose_among: Callable[..., str]) -> None:
    assert choose_among(devices=((0, 1), (1, 2)), one_process=False) == "shared_memory"


@pytest.mark.parametrize(("one_process", "expected"), [(True, "shared"), (False, "shared_memory")])
def test_one_model_for_both_needs_one_process(
    choose_among: Callable[..., str], one_process: bool, expected: str
) -> None:
    assert choose_among(taken=("shared", "shared_memory"), one_process=one_process) == expected


def test_one_model_for_both_needs_one_dtype(choose_among: Callable[..., str]) -> None:
    assert choose_among(taken=("shared", "shared_memory"), dtypes=("fp32", "bf16")) == "shared_memory"


def test_a_sampler_that_plays_ahead_has_weights_of_its_own(choose_among: Callable[..., str]) -> None:
    assert choose_among(taken=("shared", "shared_memory"), ratio=1) == "shared_memory"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"taken": ("shared",), "ratio": 1}, r"\$\.async_generation_ratio: 1: .* Fix: async_generation_ratio: 0"),
        ({"taken": ("pigeon",)}, "no common transport"),
        ({"taken": ("shared",), "dtypes": ("fp32", "bf16")}, "Fix: the same dtype for both"),
        ({"taken": ("shared",), "one_process": False}, "runtime 'fake_runtime' has several processes"),
        ({"taken": ("process_group",), "devices": ((0,), (0,))}, "it shares devices with actor_train"),
    ],
)
def test_why_no_transport_is_left_is_reported(
    choose_among: Callable[..., str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_among(**settings)


def test_a_backend_learns_what_devices_the_runtime_will_give_it(
    choose_among: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def transports(config: Any, context: Any) -> tuple[str, ...]:
        seen.append(context.devices)
        return ("shared_memory",)

    choose_among()  # puts the fakes' own back afterwards
    config = one_step(
        actor_train=Role(strategy_args=Choice("fake_strategy")),
        actor_infer=Role(strategy_args=Choice("fake_backend")),
        runtime=Choice("fake_runtime"),
    )
    monkeypatch.setattr(FakeBackend, "transports", staticmethod(transports))
    numbered = evolve(config, actor_infer=evolve(config.actor_infer, device_mapping=(3,)))
    for run, capabilities in (
        (config, RuntimeCapabilities()),
        (config, RuntimeCapabilities(least_devices=1)),
        (numbered, RuntimeCapabilities(least_devices=1)),
        (numbered, RuntimeCapabilities(gpus=False)),
    ):
        monkeypatch.setattr(FakeRuntime, "capabilities", capabilities)
        choose(run)
    assert seen == [(), (0,), (3,), ()]


class Side:
    """A trainer and a backend in one, each of which answers, raises, or waits until it is given up."""

    def __init__(self, send: Any = None, receive: Any = 7) -> None:
        self.does = {"send": send, "receive": receive}
        self.given_up: list[str] = []
        self.calls: list[str] = []

    async def _answer(self, method: str) -> Any:
        self.calls.append(method)
        answer = self.does.get(method)
        if isinstance(answer, Exception):
            raise answer
        if answer == "wait":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.given_up.append(method)
                raise
        return answer

    async def offer(self, transport: str, version: int, receivers: int) -> Offer:
        await self._answer("offer")
        return Offer(transport, version)

    async def send(self, offer: Offer) -> None:
        await self._answer("send")

    async def receive(self, offer: Offer) -> Any:
        return await self._answer("receive")

    def receivers(self, transport: str) -> int:
        return 1

    async def pause(self) -> None:
        await self._answer("pause")

    async def resume(self) -> None:
        await self._answer("resume")

    async def leave(self) -> None:
        await self._answer("leave")

    async def wake(self, what: str) -> None:
        await self._answer(f"wake {what}")

    async def onload(self) -> None:
        await self._answer("onload")

    async def offload(self) -> None:
        await self._answer("offload")

    async def sleep(self) -> None:
        await self._answer("sleep")


def passed(side: Side) -> int:
    async def whole() -> int:
        try:
            return await deliver(side, side, Offer("any", 7))
        finally:
            await asyncio.sleep(0)  # what is given up learns of it

    return asyncio.run(whole())


def test_a_trainer_without_memory_is_reported_though_the_backend_noticed_first() -> None:
    class Late(Side):
        async def send(self, offer: Offer) -> None:
            await asyncio.sleep(0.05)
            await super().send(offer)

    gone = EngineError("the trainer stopped sending")
    with pytest.raises(OutOfMemory, match="lower model_update_buffer_size_mb"):
        passed(Late(send=OutOfMemory("lower model_update_buffer_size_mb"), receive=gone))
    with pytest.raises(EngineError, match="the trainer stopped sending"):
        passed(Late(send=TrainerError("one stopped reading"), receive=gone))


def test_the_version_is_the_backends() -> None:
    assert passed(Side()) == 7


@pytest.mark.parametrize(
    ("side", "error", "other"),
    [
        (Side(send="wait", receive=EngineError("the engine did not start")), "the engine did not start", "send"),
        (Side(send=TrainerError("out of chalk"), receive="wait"), "out of chalk", "receive"),
    ],
)
def test_a_side_whose_other_failed_is_given_up_after_a_moment(
    side: Side, error: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "GRACE_SECONDS", 0.1)
    began = time.monotonic()
    with pytest.raises((EngineError, TrainerError), match=error):
        passed(side)
    assert time.monotonic() - began < 30
    assert side.given_up == [other]


def test_when_both_fail_the_first_is_reported() -> None:
    with pytest.raises(EngineError, match="no room"):
        passed(Side(send=EngineError("no room"), receive=EngineError("the trainer stopped sending")))


def test_nothing_is_offered_before_the_backend_has_paused() -> None:
    side = Side()
    asyncio.run(update(side, side, "any", 7, side.leave, pausing=60, passing=60))
    assert side.calls == ["pause", "offer", "send", "receive", "leave", "resume"]


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ({"pause": "wait"}, "did not pause for version 7 within runtime_timeout = 0.05 s"),
        ({"send": "wait"}, "the weight update to version 7 took over weight_sync_timeout = 0.1 s"),
        ({"receive": 6}, "serves version 6 after the weight update to 7"),
    ],
)
def test_an_update_ends_in_time_and_with_the_right_version(does: dict[str, Any], error: str) -> None:
    side = Side()
    side.does |= does
    with pytest.raises(EngineError, match=error):
        asyncio.run(update(side, side, "any", 7, side.leave, pausing=0.05, passing=0.1))
    assert ("resume" in side.calls) == ("pause" not in does), "an attached engine would stay paused"


def test_a_version_is_published_by_the_chosen_transport_to_a_sampler_that_has_room() -> None:
    class Sampler(Side):
        async def receive(self, offer: Offer) -> Any:
            assert (offer.transport, offer.version) == ("pigeon", 7)
            return await super().receive(offer)

    config = one_step(
        actor_train=Role(device_mapping=(0,)),
        actor_infer=Role(device_mapping=(0,)),
    )
    side: Any = Sampler()
    colocation = Colocation(config, {"actor_train": side}, side)
    roles = Roles(side, side, side, None, False, None, "pigeon", colocation)
    weights = WeightSync(config, roles)

    async def twice() -> None:
        await weights.publish(7)
        await colocation.sleep()
        await weights.publish(7)

    asyncio.run(twice())
    update = ["wake weights", "pause", "offer", "send", "receive", "offload", "wake cache", "resume"]
    assert side.calls == ["offload", "pause", "sleep", "onload", *update, "sleep", "onload", *update]
