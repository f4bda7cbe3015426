"""What a server or an engine is started with, and what an attached one must have: arguments, environment, keys."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from vllm_cases import NEEDS_VLLM

from turnwise.contracts.inference import InferenceContext
from turnwise.contracts.train import Lora
from turnwise.errors import ConfigError
from turnwise_vllm import arguments
from turnwise_vllm.backend import VllmBackend
from turnwise_vllm.config import VllmConfig
from turnwise_vllm.guard import Guard
from turnwise_vllm.process import server_command, server_environment
from turnwise_vllm.server import ServedEngine

GB = 10**9
TP, PP, SHARE = "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization"


@pytest.mark.engines
@NEEDS_VLLM
def test_argument_names_are_those_of_the_real_engine() -> None:
    known = arguments.argument_names()
    assert known is not None
    typed = set(arguments.engine_arguments(VllmConfig(), InferenceContext(Path(), None), cpu=False))
    assert typed <= known
    assert {"speculative_config", "scheduling_policy", "enable_log_requests"} <= known


def test_a_models_own_code_runs_in_the_engine_only_where_the_run_says_so(folder: Path) -> None:
    for trusted in (False, True):
        made = arguments.engine_arguments(
            VllmConfig(), InferenceContext(folder, None, trust_remote_code=trusted), cpu=False
        )
        assert made["trust_remote_code"] is trusted
    (line,) = VllmBackend.check(VllmConfig(engine_args={"trust_remote_code": True}), InferenceContext(None, None))
    assert "engine_args.trust_remote_code: set by the run. Fix: leave it out, and set trust_remote_code" in str(line)


def test_arguments_of_a_cpu_are_small_and_those_of_gpus_are_the_engines(folder: Path) -> None:
    context = InferenceContext(folder, None, dtype="fp32", sequence_length=200, infer_batch_size=10)
    cpu = arguments.engine_arguments(VllmConfig(engine_args={"swap_space": 1}), context, cpu=True)
    # Two blocks of 128 tokens for each of ten sequences; a token is key and value of two layers of two heads of 32
    # float32 numbers.
    assert cpu["kv_cache_memory_bytes"] == 10 * 256 * (2 * 2 * 2 * 32 * 4)
    assert (cpu["enforce_eager"], cpu["max_num_seqs"], cpu["max_model_len"], cpu["dtype"], cpu["swap_space"]) == (
        True,
        10,
        200,
        "float32",
        1,
    )
    assert SHARE not in cpu
    given = arguments.engine_arguments(
        VllmConfig(block_size=32, gpu_memory_utilization=0.4), InferenceContext(folder, None), cpu=False
    )
    assert (given["block_size"], given[SHARE]) == (32, 0.4)
    gpu = arguments.engine_arguments(
        VllmConfig(tensor_parallel_size=2), InferenceContext(folder, None, devices=(0, 1, 2, 3)), cpu=False
    )
    assert (gpu["enforce_eager"], gpu["data_parallel_size"], gpu[SHARE]) == (False, 2, 0.9)
    assert gpu["distributed_executor_backend"] == "mp"  # in a Ray actor's place vLLM would take Ray
    assert "distributed_executor_backend" not in cpu
    assert "kv_cache_memory_bytes" not in gpu
    assert arguments.cache_bytes(VllmConfig(), context, 200, 10**9) == 4 * 2**30


@pytest.mark.parametrize(("written", "cpu", "gpu"), [(16, 32, 16), (32, 32, 32), (40, 64, 40), (None, None, None)])
def test_a_block_of_the_field_s_files_is_one_that_a_cpu_takes(
    folder: Path, written: int | None, cpu: int | None, gpu: int | None
) -> None:
    """16 is common on GPUs, and no attention of vLLM's for CPUs has it."""
    config = VllmConfig(block_size=written)
    assert arguments.engine_arguments(config, InferenceContext(folder, None), cpu=True).get("block_size") == cpu
    assert arguments.engine_arguments(config, InferenceContext(folder, None), cpu=False).get("block_size") == gpu


def test_the_environment_lasts_for_the_start_and_leaves_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    values = arguments.environment(VllmConfig(start_timeout=7.5), cpu=True)
    assert "OMP_NUM_THREADS" not in values
    assert values["VLLM_ENGINE_READY_TIMEOUT_S"] == "7"
    monkeypatch.setenv("LD_PRELOAD", "")
    with arguments.applied(values):
        assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"
        os.environ["LD_PRELOAD"] = "set by vLLM"
    assert "VLLM_LOGGING_LEVEL" not in os.environ
    assert os.environ["LD_PRELOAD"] == ""


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/collective_rpc", [], 401),
        ("/v1/models", [(b"authorization", b"Bearer other")], 401),
        ("/pause", [(b"authorization", b"Basic the-key")], 401),
        ("/collective_rpc", [(b"authorization", b"Bearer the-key")], 200),
        ("/health", [], 200),
        ("/health/other", [], 401),
    ],
)
def test_a_server_of_the_run_answers_who_has_its_key(
    monkeypatch: pytest.MonkeyPatch, path: str, headers: list[Any], status: int
) -> None:
    """vLLM itself guards its routes of requests alone: not those of weights, nor the one that calls any method of its
    workers."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def scene() -> None:
        guard = Guard(app)
        for kind in ("http", "lifespan"):
            sent: list[Any] = []

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            await guard({"type": kind, "path": path, "headers": headers}, None, send)
            assert sent[0]["status"] == (status if kind == "http" else 200)

    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    asyncio.run(scene())


def test_the_servers_key_is_in_its_environment_alone(folder: Path) -> None:
    context = InferenceContext(folder, None)
    assert server_environment(VllmConfig(mode="server"), context, True, "the-key")["VLLM_API_KEY"] == "the-key"
    command = server_command({}, 1)
    assert command[command.index("--middleware") + 1] == "turnwise_vllm.guard.Guard"


@pytest.mark.usefixtures("engine_source")
def test_the_key_of_an_attached_server_is_in_a_variable_that_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    context = InferenceContext(None, None)
    (line,) = VllmBackend.check(VllmConfig(mode="attach", base_url="http://h:1", api_key_env="NO_KEY"), context)
    assert line.machine and "the environment variable NO_KEY with the server's key is not set. Fix: set it" in line.text
    (line,) = VllmBackend.check(VllmConfig(mode="attach", base_url="h:1"), context)
    assert "'h:1' is no address" in line.text
    (line,) = VllmBackend.check(VllmConfig(mode="server", api_key_env="NO_KEY"), context)
    assert "api_key_env: is for mode attach, and mode is server" in str(line)


def test_the_roles_devices_are_positions_within_what_the_run_may_see(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    values = server_environment(
        VllmConfig(mode="server"), InferenceContext(folder, None, devices=(1, 2)), False, "the-key"
    )
    assert values["CUDA_VISIBLE_DEVICES"] == "5,6"


@pytest.mark.parametrize(
    ("changes", "expected", "fix"),
    [
        ({}, {}, ""),
        ({}, {"model": "/other"}, ""),  # whole weights come
        ({"updates": False}, {}, ""),
        ({"updates": False}, {"model": "/other"}, r"--model /\S+ \(it has /other, and no weights will be sent\)"),
        (
            {"lora": Lora(4, 8, None, "adapter")},
            {"model": "/other"},
            r"--model /\S+ \(it has /other, and only adapters will be sent\)",
        ),
        ({}, {"dtype": "torch.bfloat16"}, r"--dtype float32 \(it has bfloat16\)"),
        ({}, {"max_model_len": 63}, r"--max-model-len 64 \(it has 63\)"),
    ],
)
def test_an_attached_server_is_judged_by_what_it_reports(
    folder: Path, changes: dict[str, Any], expected: dict[str, Any], fix: str
) -> None:
    context = InferenceContext(folder, None, **{"dtype": "fp32", "sequence_length": 64, **changes})
    model = {
        "model": str(folder),
        "dtype": "torch.float32",
        "max_model_len": 64,
        "logprobs_mode": "processed_logprobs",
        **expected,
    }
    server = {
        "model_config": model,
        "weight_transfer_config": {"backend": arguments.TRANSFER},
        "lora_config": {"max_lora_rank": 8},
    }
    engine = ServedEngine(VllmConfig(mode="attach", base_url="http://h:1"), context)
    if not fix:
        engine.compare({"vllm_config": server})
        return
    with pytest.raises(
        ConfigError, match=rf"^the vLLM server at http://h:1 does not fit this run\. Fix: start it with {fix}$"
    ):
        engine.compare({"vllm_config": server})


def connected(*names: str) -> dict[str, Any]:
    """A kv_transfer_config of one connector, or of several."""
    if len(names) == 1:
        return {"kv_connector": names[0], "kv_role": "kv_both"}
    several = {"connectors": [connected(name) for name in names]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": several}


@pytest.mark.parametrize(
    ("transfer", "named"),
    [
        (connected("OffloadingConnector"), ""),
        (connected("LMCacheConnectorV1"), "LMCacheConnectorV1"),
        (connected("OffloadingConnector", "SimpleCPUOffloadConnector"), ""),
        (connected("OffloadingConnector", "ExampleConnector", "FlexKVConnectorV1"), "ExampleConnector, FlexKV"),
        (json.dumps(connected("ExampleConnector")), "ExampleConnector"),
    ],
)
def test_a_connector_whose_cache_outlasts_an_update_is_refused_where_updates_come(
    folder: Path, transfer: Any, named: str
) -> None:
    config, context = VllmConfig(engine_args={"kv_transfer_config": transfer}), InferenceContext(folder, None)
    attached = ServedEngine(VllmConfig(mode="attach", base_url="http://h:1"), evolve(context, dtype="fp32"))
    server = {
        "model_config": {
            "model": str(folder), "dtype": "float32", "max_model_len": 2048, "logprobs_mode": "processed_logprobs",
        },
        "weight_transfer_config": {"backend": arguments.TRANSFER},
        "kv_transfer_config": transfer,
    }  # fmt: skip
    assert arguments.problems(config, evolve(context, updates=False)) == []
    if not named:
        assert arguments.problems(config, context) == []
        attached.compare({"vllm_config": server})
        return
    (line,) = arguments.problems(config, context)
    assert re.search(rf"kv_transfer_config: vLLM does not drop what {named}.* Fix: leave it out, or one of", str(line))
    with pytest.raises(ConfigError, match=rf"keeps what {named}.* cached of old weights at an update\. Fix: start it"):
        attached.compare({"vllm_config": server})


def test_offloading_to_a_cache_that_is_not_dropped_is_refused(folder: Path) -> None:
    config = VllmConfig(engine_args={"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"})
    (line,) = arguments.problems(config, InferenceContext(folder, None))
    assert str(line).endswith(
        "kv_offloading_backend: vLLM does not drop what lmcache cached of the old weights at an update. Fix: native"
    )


def test_the_servers_command_line_has_the_arguments_in_vllms_spelling() -> None:
    command = server_command(
        {
            "max_model_len": 64,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "weight_transfer_config": {"backend": "b"},
        },
        5,
    )
    assert command[-6:] == [
        "--max-model-len",
        "64",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--weight-transfer-config",
        '{"backend": "b"}',
    ]
    assert command[command.index("--host") + 1] == "127.0.0.1"
