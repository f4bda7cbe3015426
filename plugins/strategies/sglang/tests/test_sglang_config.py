"""The options of sglang: how devices divide, what a device holds, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from turnwise.config.convert import structure
from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.data.trajectory import int32
from turnwise.errors import EngineError
from turnwise.testing.fake_model import FakeChat
from turnwise_sglang import inference_backends
from turnwise_sglang.backend import SglangBackend
from turnwise_sglang.config import RUNTIME_BYTES, SglangConfig

GB = 10**9
TP, PP, SHARE = "tp_size", "pp_size", "mem_fraction_static"


@pytest.mark.parametrize(("tp", "pp", "world", "engines"), [(1, 1, 8, 8), (4, 1, 8, 2), (2, 2, 8, 2), (1, 1, 1, 1)])
def test_devices_are_divided_into_engines(tp: int, pp: int, world: int, engines: int) -> None:
    assert SglangConfig(**{TP: tp, PP: pp}).data_parallel_size(world) == engines


def test_devices_that_cannot_be_divided_are_an_error_that_names_the_sizes() -> None:
    with pytest.raises(ValueError, match=f"6 devices are not divisible by {TP} 4"):
        SglangConfig(**{TP: 4}).data_parallel_size(6)


def test_the_cache_gets_what_the_weights_leave() -> None:
    facts = {"parameters": 7 * GB, "dtype": "fp16", "device_bytes": 80 * GB}
    assert SglangConfig(**{SHARE: 0.5}).memory(facts) == {
        "weights": 14 * GB,
        "kv_cache": 26 * GB,
        "activations": RUNTIME_BYTES,
    }
    assert SglangConfig(**{SHARE: 0.5, TP: 2}).memory(facts)["weights"] == 7 * GB
    assert SglangConfig(**{SHARE: 0.1}).memory(facts)["kv_cache"] == 0


@pytest.mark.parametrize("options", [{TP: 0}, {SHARE: 0.0}, {SHARE: 1.5}])
def test_values_out_of_range_are_refused(options: dict[str, float]) -> None:
    assert structure(SglangConfig, options)[1]


def test_copies_inside_one_server_are_counted() -> None:
    config = SglangConfig(**{TP: 2, "dp_size": 2})
    assert config.data_parallel_size(8) == 4
    with pytest.raises(ValueError, match=f"6 devices are not divisible by {TP} 2 × pp_size 1 × dp_size 2"):
        config.data_parallel_size(6)


def test_a_pause_that_keeps_the_cache_of_old_weights_is_refused_with_the_reason() -> None:
    ((path, words),) = structure(SglangConfig, {"pause_mode": "in_place"})[1]
    assert path == ("pause_mode",)
    assert "the tokens match neither policy. Fix: pause_mode: retract" in words


def test_it_runs_and_needs_no_sglang_in_this_interpreter() -> None:
    (record,) = inference_backends()
    assert record.requires == ("torch", "httpx2")


def backend(
    folder: Path, devices: tuple[int, ...] = (), kind: type[SglangBackend] = SglangBackend, **options: Any
) -> SglangBackend:
    (folder / "config.json").write_text('{"vocab_size": 32}', encoding="utf-8")
    return kind(SglangConfig(**options), InferenceContext(folder, FakeChat(end=2), devices=devices))


@pytest.mark.parametrize(
    ("devices", "options", "expected"),
    [
        ((), {}, ("shared_memory", "process_group", "safetensors")),
        ((0,), {}, ("process_group", "shared_memory", "safetensors")),
        ((0, 1), {"pp_size": 2}, ("shared_memory", "safetensors")),
        ((0, 1), {"dp_size": 2}, ("safetensors",)),
    ],
)
def test_weights_come_by_what_the_devices_and_the_engine_can(
    tmp_path: Path, devices: tuple[int, ...], options: dict[str, int], expected: tuple[str, ...]
) -> None:
    context = InferenceContext(None, None, devices=devices)
    assert SglangBackend.transports(SglangConfig(**options), context) == expected


def test_the_turns_of_a_trajectory_go_to_one_copy_and_trajectories_to_all(tmp_path: Path) -> None:
    class Noting(SglangBackend):
        async def _answer(self, request: Request, payload: dict[str, Any]) -> Any:
            copies.append(payload.get("routed_dp_rank"))
            await asyncio.sleep(0)

    def asked(trajectory: int, turn: int) -> Request:
        return Request(0, GeneratingArgs(), 4, order=(0, 0, trajectory, 0, turn), ids=int32([3]))

    async def scene(**options: Any) -> None:
        served = backend(tmp_path, kind=Noting, **options)
        for turn in range(2):
            await asyncio.gather(*(served.generate(asked(trajectory, turn)) for trajectory in range(4)))

    copies: list[int | None] = []
    asyncio.run(scene(dp_size=2))
    assert copies == [0, 1, 0, 1] * 2
    copies.clear()
    asyncio.run(scene())
    assert copies == [None] * 8


def test_a_server_without_the_weights_of_the_one_before_it_is_not_sampled_from(tmp_path: Path) -> None:
    from turnwise_sglang.link import Link

    async def scene() -> None:
        served = backend(tmp_path)
        served.links.current = Link(cast(Any, None), None, bare=True)
        with pytest.raises(
            EngineError, match="SGLang died and was started again; its weights had come by process_group"
        ):
            await served.generate(Request(0, GeneratingArgs(), 4, ids=int32([3])))

    asyncio.run(scene())
