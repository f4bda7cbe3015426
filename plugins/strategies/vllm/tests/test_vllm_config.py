"""The options of vllm and what becomes of them without the engine: sizes, names, sampling parameters, log-probs that
are not ours, versions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from turnwise.config.convert import structure
from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.contracts.train import Lora, Offer
from turnwise.errors import ConfigError, EngineError, MachineError
from turnwise.testing.fake_model import FakeChat
from turnwise_vllm import arguments, inference_backends
from turnwise_vllm.backend import VllmBackend
from turnwise_vllm.config import RUNTIME_BYTES, VllmConfig
from turnwise_vllm.requests import Answer, are_ours, generation, sampling

GB = 10**9
TP, PP, SHARE = "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization"


@pytest.mark.parametrize(("tp", "pp", "world", "engines"), [(1, 1, 8, 8), (4, 1, 8, 2), (2, 2, 8, 2), (1, 1, 1, 1)])
def test_devices_are_divided_into_engines(tp: int, pp: int, world: int, engines: int) -> None:
    assert VllmConfig(**{TP: tp, PP: pp}).data_parallel_size(world) == engines


def test_devices_that_cannot_be_divided_are_an_error_that_names_the_sizes() -> None:
    with pytest.raises(ValueError, match=f"6 devices are not divisible by {TP} 4"):
        VllmConfig(**{TP: 4}).data_parallel_size(6)


def test_the_cache_gets_what_the_weights_leave() -> None:
    facts = {"parameters": 7 * GB, "dtype": "fp16", "device_bytes": 80 * GB}
    assert VllmConfig(**{SHARE: 0.5}).memory(facts) == {
        "weights": 14 * GB,
        "kv_cache": 26 * GB - RUNTIME_BYTES,
        "activations": RUNTIME_BYTES,
    }
    assert VllmConfig(**{SHARE: 0.5, TP: 2}).memory(facts)["weights"] == 7 * GB
    assert VllmConfig(**{SHARE: 0.1}).memory(facts)["kv_cache"] == 0


@pytest.mark.parametrize(
    "options",
    [{TP: 0}, {SHARE: 0.0}, {SHARE: 1.5}, {"mode": "remote"}, {"start_timeout": 0.0}, {"logprobs_mode": "raw_logits"}],
)
def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    assert structure(VllmConfig, options)[1]


def test_the_record_needs_the_engine_and_runs_it() -> None:
    (record,) = inference_backends()
    assert record.requires == ("vllm",)


@pytest.mark.usefixtures("engine_source")
@pytest.mark.parametrize(
    ("options", "devices", "expected"),
    [
        ({"engine_args": {"max_num_seq": 3}}, (), "has no engine argument 'max_num_seq'. Did you mean 'max_num_seqs'?"),
        ({"engine_args": {"swap_space": 4, "enable_log_requests": True}}, (), None),
        ({"engine_args": {"block_size": 16}}, (), "engine_args.block_size: has a key of its own"),
        (
            {"engine_args": {"dtype": "half"}},
            (),
            "set by the run. Fix: leave it out, and set actor_infer.model_args.dtype",
        ),
        ({"mode": "attach"}, (), "mode attach needs the server's address"),
        (
            {"mode": "attach", "base_url": "http://x", "engine_args": {"swap_space": 1}},
            (),
            "cannot be set from here: swap_space",
        ),
        ({"base_url": "http://x"}, (), "is for mode attach, and mode is in_process"),
        ({"max_model_len": 100}, (), "100 is below sequence_length 2048"),
        ({"enable_sleep_mode": True}, (), "no device memory to give back on a CPU"),
        ({TP: 2}, (0, 1, 2), "3 devices are not divisible"),
        ({"engine_args": {"data_parallel_size": 3}}, (0, 1), "2 devices hold 2 engines"),
        ({"engine_args": {"data_parallel_size": 0}}, (), "0 is not a positive integer"),
        ({TP: 2, "enable_sleep_mode": True}, (0, 1, 2, 3), None),
        ({TP: 2}, (0, 1, 2, 3), None),
        (
            {"mode": "attach", "base_url": "http://x", TP: 2},
            (0, 1, 2, 3),
            "4 devices are 2 engines, and base_url names one server",
        ),
        ({"mode": "attach", "base_url": "http://x", TP: 2}, (0, 1), None),
        ({"python_path": ("/x",)}, (), "python_path: is for mode server, and mode is in_process"),
        ({"mode": "server", "python_path": ("/x",)}, (), None),
    ],
)
def test_options_are_checked_without_starting_anything(
    options: dict[str, Any], devices: tuple[int, ...], expected: str | None
) -> None:
    lines = [
        str(problem)
        for problem in VllmBackend.check(VllmConfig(**options), InferenceContext(None, None, devices=devices))
    ]
    if expected is None:
        assert lines == []
    else:
        assert any(expected in line for line in lines), lines
        assert all(line.startswith("$.actor_infer") for line in lines)


@pytest.mark.usefixtures("engine_source")
def test_processes_on_cpus_have_no_memory_to_give_back_though_they_have_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "cpu_build", lambda: True)
    (lack,) = VllmBackend.check(VllmConfig(enable_sleep_mode=True), InferenceContext(None, None, devices=(0, 1)))
    assert lack.machine and lack.text.startswith("needs vLLM for GPUs, and its build for CPUs is installed. Fix: ")
    with pytest.raises(
        MachineError, match=r"^\$\.actor_infer\.strategy_args\.strategy_config\.enable_sleep_mode: needs vLLM for GPUs"
    ):
        VllmBackend(VllmConfig(enable_sleep_mode=True), InferenceContext(folder, FakeChat(end=2), devices=(0,)))
    assert (
        VllmBackend.check(
            VllmConfig(enable_sleep_mode=True, mode="attach", base_url="http://x"),
            InferenceContext(None, None, devices=(0,)),
        )
        == []
    )


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (8, 8), (48, 64), (512, 512)])
def test_adapters_alone_get_the_smallest_rank_that_vllm_has(folder: Path, rank: int, served: int) -> None:
    context = InferenceContext(folder, FakeChat(end=2), lora=Lora(rank, rank, sync="adapter"))
    made = arguments.engine_arguments(VllmConfig(), context, cpu=True)
    assert (made["enable_lora"], made["max_loras"], made["max_lora_rank"]) == (True, 1, served)
    assert VllmConfig().capabilities.adapters
    backend = VllmBackend(VllmConfig(tensor_parallel_size=2), context)
    assert backend.receivers("shared_memory") == 1
    asyncio.run(backend.close())
    assert "enable_lora" not in arguments.engine_arguments(VllmConfig(), InferenceContext(folder, None), cpu=True)


@pytest.mark.parametrize(
    ("options", "rank", "expected"),
    [
        (
            {"load_format": "dummy"},
            8,
            "load_format: dummy, but lora_sync: adapter sends no weights of the model itself. Fix: load_format: auto",
        ),
        ({}, 513, "actor_train.model_args.lora_rank: vLLM takes adapters of ranks up to 512"),
    ],
)
def test_adapters_alone_need_a_base_and_a_rank_that_vllm_takes(
    options: dict[str, Any], rank: int, expected: str
) -> None:
    context = InferenceContext(None, None, lora=Lora(rank, 8, sync="adapter"))
    (line,) = map(str, VllmBackend.check(VllmConfig(**options), context))
    assert expected in line


def test_a_model_that_sees_needs_torchvision_in_its_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "config.json").write_text('{"text_config": {"vocab_size": 9}, "vision_config": {}}', encoding="utf-8")
    found: dict[str, Any] = {"torchvision": None}
    monkeypatch.setattr(arguments.importlib.util, "find_spec", found.get)
    with monkeypatch.context() as there:
        there.chdir(folder)  # before a run `check` has no folder to look into
        assert VllmBackend.check(VllmConfig(), InferenceContext(Path(), None)) == []
    (line,) = map(str, VllmBackend.check(VllmConfig(), InferenceContext(folder, None)))
    assert "need torchvision, and it is not installed" in line
    assert VllmBackend.check(VllmConfig(mode="server"), InferenceContext(folder, None)) == []
    found["torchvision"] = object()
    assert VllmBackend.check(VllmConfig(), InferenceContext(folder, None)) == []


@pytest.mark.parametrize(
    ("option", "sleeps", "devices", "told"),
    [
        (None, True, (0,), True),
        (None, False, (0,), False),
        (None, True, (), False),
        (False, True, (0,), False),
        (True, False, (0,), True),
    ],
)
def test_an_engine_that_takes_turns_on_gpus_is_started_to_sleep_unless_somebody_chose(
    folder: Path, option: bool | None, sleeps: bool, devices: tuple[int, ...], told: bool
) -> None:
    config, context = (
        VllmConfig(enable_sleep_mode=option),
        InferenceContext(folder, None, devices=devices, sleeps=sleeps),
    )
    assert arguments.engine_arguments(config, context, cpu=False)["enable_sleep_mode"] is told
    assert config.capabilities.sleeps_on_demand is (option is None)


def test_an_engine_on_gpus_sleeps_only_where_sleeping_is_enabled(folder: Path) -> None:
    assert "enable_sleep_mode: true" in VllmConfig(enable_sleep_mode=False).capabilities.cannot_sleep
    assert VllmConfig(enable_sleep_mode=True).capabilities.cannot_sleep == ""
    attached = VllmConfig(mode="attach", base_url="http://127.0.0.1:1")
    assert attached.capabilities.cannot_sleep == ""
    assert not attached.capabilities.sleeps_on_demand
    awake = SimpleNamespace(_context=InferenceContext(folder, None, devices=(0,)), _config=VllmConfig())
    with pytest.raises(EngineError, match=r"without sleep mode\. Fix: strategy_config\.enable_sleep_mode: true"):
        asyncio.run(VllmBackend.sleep(awake))  # type: ignore[arg-type]


def test_an_update_after_which_the_engine_serves_another_version_is_reported(folder: Path) -> None:
    class Engine:
        async def control(self, step: str, **options: Any) -> Any:
            return {"version": "2", "reset_cache": True}.get(step)

    backend = VllmBackend(VllmConfig(), InferenceContext(folder, FakeChat(end=2)))
    backend.engine = Engine()  # type: ignore[assignment]
    with pytest.raises(EngineError, match="version 3 of the weights was sent, and vLLM serves 2"):
        asyncio.run(backend.receive(Offer("safetensors", 3, {"folder": "x"})))


def test_a_response_has_its_time_without_pauses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Engine:
        async def control(self, step: str, **options: Any) -> Any:
            nonlocal now
            # Weights that take longer than a response may.
            now += 100 if step == "update" else 0
            await asyncio.sleep(0)
            return {"version": "3", "reset_cache": True}.get(step)

        async def generate(self, *asked: Any) -> Any:
            await asyncio.Event().wait()

        async def close(self) -> None:
            pass

    async def scene() -> None:
        nonlocal now
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        backend = VllmBackend(VllmConfig(request_timeout=10), InferenceContext(folder, FakeChat(end=2)))
        backend.engine = Engine()  # type: ignore[assignment]
        request = Request(0, GeneratingArgs(), 4, ids=np.array([1], np.int32))
        task = asyncio.ensure_future(backend.generate(request))
        await backend.pause()
        for _ in range(2):
            await backend.receive(Offer("safetensors", 3, {"folder": "x"}))
            assert not task.done()
            # Once with a pause that was asked for, once with its own.
            await backend.resume()
        now += 11
        with pytest.raises(EngineError, match=r"did not answer within request_timeout = 10 s\. Fix: raise it"):
            await task
        await backend.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("args", "processed", "raw"),
    [
        ({"temperature": 0.7}, True, False),
        ({"temperature": 1.0}, True, True),
        ({"temperature": 0.0, "top_p": 0.5}, True, True),
        ({"temperature": 1.0, "top_p": 0.9}, False, True),
        ({"temperature": 0.7, "top_k": 5}, False, False),
    ],
)
def test_log_probs_are_given_only_where_they_are_ours(args: dict[str, Any], processed: bool, raw: bool) -> None:
    chosen = GeneratingArgs(**args)
    assert (are_ours(chosen, "processed_logprobs"), are_ours(chosen, "raw_logprobs")) == (processed, raw)
    request = Request(0, chosen, 4)
    for mode, ours in (("processed_logprobs", processed), ("raw_logprobs", raw)):
        answer = generation(Answer([65, 2], [-1.0, -2.0], [("0", 0, 2)], "stop"), request, FakeChat(end=2), mode)
        assert (answer.logprobs is not None) == ours


def test_sampling_parameters_leave_the_end_to_the_chat() -> None:
    fields = sampling(Request(2**63 + 5, GeneratingArgs(8, 0.7, stop_strings=("x",)), 8), room=6, stop_ids=(2, 3))
    assert fields["max_tokens"] == 6
    assert fields["stop_token_ids"] == [2, 3]
    assert fields["ignore_eos"]
    assert fields["seed"] == 5
    assert (fields["stop"], fields["include_stop_str_in_output"], fields["detokenize"]) == (["x"], True, True)


@pytest.mark.parametrize(("included", "text"), [(True, "ABC"), (False, "A")])
def test_the_text_ends_at_the_stop_string_and_the_ids_do_not(included: bool, text: str) -> None:
    request = Request(0, GeneratingArgs(8, 1.0, stop_strings=("BC",), include_stop_str_in_output=included), 8)
    answer = generation(
        Answer([65, 66, 67], [-1.0] * 3, [("4", 0, 3)], "stop"), request, FakeChat(end=2), "processed_logprobs"
    )
    assert (answer.text, answer.finish) == (text, "stop")
    assert answer.ids is not None
    assert answer.ids.tolist() == [65, 66, 67]


def test_log_probs_that_are_no_numbers_are_an_error() -> None:
    answer = Answer([1], [float("nan")], [("0", 0, 1)], "stop")
    with pytest.raises(EngineError, match="not finite"):
        generation(answer, Request(0, GeneratingArgs(), 4), FakeChat(end=2), "processed_logprobs")


def test_images_for_a_model_of_text_are_refused_before_anything_starts(folder: Path) -> None:
    backend = VllmBackend(VllmConfig(), InferenceContext(folder, FakeChat(end=2)))
    request = Request(0, GeneratingArgs(), 4, ids=np.array([3], np.int32), images=(np.zeros((28, 28, 3), np.uint8),))
    with pytest.raises(EngineError, match="holds 1 images, and the model takes text only"):
        asyncio.run(backend.generate(request))


def test_the_turns_of_a_trajectory_go_to_one_copy_and_trajectories_to_all(folder: Path) -> None:
    class Engine:
        async def generate(self, ids: Any, sampling: Any, name: str, pictures: Any, copy: int | None) -> Answer:
            copies.append(copy)
            return Answer([3], [-1.0], [("0", 0, 1)], "stop")

    def asked(trajectory: int, turn: int) -> Request:
        return Request(0, GeneratingArgs(), 4, order=(0, 0, trajectory, 0, turn), ids=np.array([3], np.int32))

    async def scene(count: int) -> None:
        backend = VllmBackend(
            VllmConfig(engine_args={"data_parallel_size": count}), InferenceContext(folder, FakeChat(end=2))
        )  # type: ignore[arg-type]
        backend.engine = Engine()  # type: ignore[assignment]
        for turn in range(2):
            await asyncio.gather(*(backend.generate(asked(trajectory, turn)) for trajectory in range(4)))

    copies: list[int | None] = []
    asyncio.run(scene(2))
    assert copies == [0, 1, 0, 1] * 2
    copies.clear()
    asyncio.run(scene(1))
    assert copies == [None] * 8


def test_without_a_model_it_refuses_in_one_line() -> None:
    with pytest.raises(ConfigError, match="needs a model and its chat"):
        VllmBackend(VllmConfig(), InferenceContext(model=None, chat=None))


def test_weights_go_from_gpu_to_gpu_first_and_through_shared_memory_on_a_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def transports(devices: tuple[int, ...], cpu: bool) -> tuple[str, ...]:
        monkeypatch.setattr("turnwise_vllm.backend.cpu_build", lambda: cpu)
        return VllmBackend.transports(VllmConfig(), InferenceContext(None, None, devices=devices))

    assert transports((), True)[0] == transports((0,), True)[0] == transports((), False)[0] == "shared_memory"
    assert transports((0,), False) == ("process_group", "shared_memory", "safetensors")
