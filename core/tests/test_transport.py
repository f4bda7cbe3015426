"""Which way weights go."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from turnwise.config.schema import EnvManagerConfig, ModelArgs, Role, RunConfig
from turnwise.contracts.inference import receivers
from turnwise.contracts.train import Offer
from turnwise.errors import EngineError, OutOfMemory, TrainerError
from turnwise.pipeline import transport
from turnwise.pipeline.transport import choose, deliver, update

OFFERED = ("shared", "shared_memory", "process_group", "safetensors")
ON_GPUS = ("process_group", "shared_memory", "safetensors")


def run(train: tuple[int, ...] = (), infer: tuple[int, ...] = (), dtypes: tuple[Any, Any] = ("bf16", "bf16")) -> RunConfig:
    return RunConfig(
        max_steps=1,
        rollout_batch_size=4,
        pretrain="fake",
        train_env_manager=EnvManagerConfig(),
        custom_envs={},
        actor_train=Role(device_mapping=train, model_args=ModelArgs(dtype=dtypes[0])),
        actor_infer=Role(device_mapping=infer, model_args=ModelArgs(dtype=dtypes[1])),
    )


def test_the_backends_best_that_the_trainer_offers() -> None:
    assert choose(run((0,), (1,)), OFFERED, ON_GPUS, one_process=False) == "process_group"
    assert choose(run((0,), (1,)), ("safetensors",), ON_GPUS, one_process=False) == "safetensors"


def test_roles_on_one_device_do_not_meet_in_a_process_group() -> None:
    assert choose(run((0, 1), (1, 2)), OFFERED, ON_GPUS, one_process=False) == "shared_memory"


@pytest.mark.parametrize(("one_process", "dtypes", "expected"), [(True, ("bf16", "bf16"), "shared"), (False, ("bf16", "bf16"), "shared_memory")])
def test_one_model_for_both_needs_one_process(one_process: bool, dtypes: tuple[str, str], expected: str) -> None:
    assert choose(run(dtypes=dtypes), OFFERED, ("shared", "shared_memory"), one_process) == expected


def test_one_model_for_both_needs_one_dtype() -> None:
    assert choose(run(dtypes=("fp32", "bf16")), OFFERED, ("shared", "shared_memory"), one_process=True) == "shared_memory"


def test_nothing_in_common_is_told() -> None:
    with pytest.raises(EngineError, match="no common transport"):
        choose(run(), OFFERED, ("pigeon",), one_process=True)


def test_the_number_of_receivers_may_depend_on_the_transport() -> None:
    class Fixed:
        receivers = 3

    class Told:
        def receivers(self, transport: str) -> int:
            return len(transport)

    assert [receivers(backend, "four") for backend in (object(), Fixed(), Told())] == [1, 3, 4]


class Side:
    """A trainer and a backend in one, each of which answers, raises, or waits until it is given up."""

    def __init__(self, send: Any = None, receive: Any = 7) -> None:
        self.does = {"send": send, "receive": receive}
        self.given_up: list[str] = []
        self.calls: list[str] = []

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        answer = Offer(*args[:2]) if method == "offer" else self.does.get(method)
        if isinstance(answer, Exception):
            raise answer
        if answer == "wait":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.given_up.append(method)
                raise
        return answer

    async def receive(self, offer: Offer) -> Any:
        return await self.call("receive", offer)

    async def pause(self) -> None:
        await self.call("pause")

    async def resume(self) -> None:
        await self.call("resume")


def passed(side: Side) -> int:
    async def whole() -> int:
        try:
            return await deliver(side, side, Offer("any", 7))
        finally:
            await asyncio.sleep(0)  # what is given up learns of it

    return asyncio.run(whole())


def test_a_trainer_without_memory_is_told_though_the_backend_noticed_first() -> None:
    class Late(Side):
        async def call(self, method: str, *args: Any) -> Any:
            if method == "send":
                await asyncio.sleep(0.05)
            return await super().call(method, *args)

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
def test_a_side_whose_other_failed_is_given_up_after_a_moment(side: Side, error: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "GRACE_SECONDS", 0.1)
    began = time.monotonic()
    with pytest.raises((EngineError, TrainerError), match=error):
        passed(side)
    assert time.monotonic() - began < 30
    assert side.given_up == [other]


def test_when_both_fail_the_first_is_told() -> None:
    with pytest.raises(EngineError, match="no room"):
        passed(Side(send=EngineError("no room"), receive=EngineError("the trainer stopped sending")))


def test_nothing_is_offered_before_the_backend_has_paused() -> None:
    side = Side()
    asyncio.run(update(side, side, "any", 7, pausing=60, passing=60))
    assert side.calls == ["pause", "offer", "send", "receive", "resume"]


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
        asyncio.run(update(side, side, "any", 7, pausing=0.05, passing=0.1))
    assert ("resume" in side.calls) == ("pause" not in does), "an attached engine would stay paused"
