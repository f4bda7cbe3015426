"""What the server is started with, what is refused before it starts, and what the machine lacks."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from turnwise.contracts.inference import InferenceContext
from turnwise.contracts.train import Lora
from turnwise.errors import ConfigError, EngineError, MachineError
from turnwise.testing.compare import says
from turnwise_sglang import arguments, fixtures
from turnwise_sglang.arguments import environment, server_arguments
from turnwise_sglang.attached import attach_problems
from turnwise_sglang.backend import SglangBackend
from turnwise_sglang.config import SglangConfig
from turnwise_sglang.server import Server

CONTEXT = InferenceContext(Path("/model"), None, seed=7, dtype="bf16", sequence_length=100)
FACTS = {
    "enable_deterministic_inference": True,
    "dp_size": 1,
    "model_path": "/model",
    "dtype": "bfloat16",
    "max_req_input_len": 100,
}
"""What an attached server reports that fits this role."""


def gpu(*devices: int, **changes: Any) -> InferenceContext:
    return InferenceContext(Path("/model"), None, dtype="fp16", devices=devices, **changes)


def test_on_a_cpu_the_server_gets_what_a_cpu_needs() -> None:
    given = server_arguments(SglangConfig(load_format="dummy"), CONTEXT, 123)
    expected = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
    }
    expected |= {
        "model_path": "/model",
        "dtype": "bfloat16",
        "port": 123,
        "host": "127.0.0.1",
        "load_format": "dummy",
        "weight_version": "0",
    }
    assert given.items() >= expected.items()
    assert given["context_length"] > 100
    assert given["enable_deterministic_inference"] is True
    values = environment(SglangConfig(), CONTEXT)
    assert (values["SGLANG_USE_CPU_ENGINE"], values["CUDA_VISIBLE_DEVICES"], values["TURNWISE_SGLANG_CPU"]) == (
        "1",
        "",
        "1",
    )


def test_a_models_own_code_runs_in_the_server_only_where_the_run_says_so() -> None:
    assert server_arguments(SglangConfig(), CONTEXT, 1)["trust_remote_code"] is False
    assert server_arguments(SglangConfig(), evolve(CONTEXT, trust_remote_code=True), 1)["trust_remote_code"] is True


def test_on_devices_the_engine_chooses_and_sees_only_the_roles_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNWISE_SGLANG_CPU", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = SglangConfig(tp_size=2, mem_fraction_static=0.5)
    given = server_arguments(config, gpu(1, 2), 1)
    assert (given["tp_size"], given["mem_fraction_static"]) == (2, 0.5)
    assert not {"device", "attention_backend", "sampling_backend", "max_total_tokens"} & given.keys()
    values = environment(config, gpu(1, 2))
    assert values["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert "TURNWISE_SGLANG_CPU" not in values


def test_what_the_user_wrote_wins_and_other_interpreters_settings_stay_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    given = server_arguments(
        SglangConfig(engine_args={"max_total_tokens": 99, "attention_backend": "intel_amx"}), CONTEXT, 1
    )
    assert (given["max_total_tokens"], given["attention_backend"]) == (99, "intel_amx")
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" not in environment(SglangConfig(), CONTEXT)
    assert environment(SglangConfig(), CONTEXT)["PYTHONPATH"] == "/somewhere"
    assert "PYTHONPATH" not in environment(SglangConfig(python=str(tmp_path / "python")), CONTEXT)


def test_sleep_needs_the_memory_saver_and_its_copy_of_the_weights() -> None:
    given = server_arguments(SglangConfig(enable_memory_saver=True), gpu(0), 1)
    assert given["enable_memory_saver"] and given["enable_weights_cpu_backup"]
    assert SglangConfig(enable_memory_saver=True).capabilities.cannot_sleep == ""
    assert "enable_memory_saver" not in server_arguments(SglangConfig(), gpu(0), 1)
    shared = evolve(gpu(0), sleeps=True)
    assert server_arguments(SglangConfig(), shared, 1)["enable_memory_saver"]
    assert "enable_memory_saver" not in server_arguments(SglangConfig(enable_memory_saver=False), shared, 1)
    assert SglangConfig().capabilities.sleeps_on_demand
    assert SglangConfig().capabilities.cannot_sleep == ""
    assert "keeps its memory" in SglangConfig(base_url="http://there").capabilities.cannot_sleep
    awake = SimpleNamespace(_config=SglangConfig(), _context=gpu(0))
    with pytest.raises(
        EngineError, match=r"keeps its memory while it sleeps\. Fix: strategy_config: \{enable_memory_saver: true\}"
    ):
        asyncio.run(SglangBackend.sleep(awake))  # type: ignore[arg-type]


def test_memory_to_give_back_needs_a_gpu_and_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"sglang": "0.5.21"}
    monkeypatch.setattr(arguments, "installed", lambda python, name="sglang": packages.get(name, ""))
    config = SglangConfig(python="p", enable_memory_saver=True)
    (line,) = map(str, SglangBackend.check(config, CONTEXT))
    assert line.endswith(
        "enable_memory_saver: there is no device memory to give back on a CPU. Fix: false, or name GPUs in"
        " device_mapping"
    )
    (lack,) = SglangBackend.check(config, gpu(0))
    assert lack.machine and lack.text.startswith("needs the package torch_memory_saver, which p lacks. Fix: ")
    packages["torch_memory_saver"] = "0.0.9"
    assert SglangBackend.check(config, gpu(0)) == []


def test_a_machine_without_sglang_is_kept_apart_from_a_wrong_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    (lack,) = SglangBackend.check(SglangConfig(python="/no/such/python"), CONTEXT)
    assert lack.machine and str(lack).startswith(
        "$.actor_infer.strategy_args.strategy_config.python: '/no/such/python' cannot be run"
    )
    monkeypatch.setattr(arguments, "installed", lambda python: "")
    (lack,) = SglangBackend.check(SglangConfig(python="p"), CONTEXT)
    assert lack.machine and lack.text.startswith("p has no sglang. Fix: install SGLang there")
    monkeypatch.setattr(arguments, "installed", lambda python: "0.4.9")
    (line,) = map(str, SglangBackend.check(SglangConfig(python="p"), CONTEXT))
    assert "p has sglang 0.4.9, 0.5.21 or newer is needed" in line
    with pytest.raises(MachineError, match="cannot be run"):
        Server("/no/such/python", {}, {}, 1)


def test_arguments_that_are_the_backends_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "installed", lambda python: "0.5.21")
    (line,) = map(str, SglangBackend.check(SglangConfig(engine_args={"port": 3}), CONTEXT))
    says(line, "$.actor_infer.strategy_args.strategy_config.port", "not the user's to set", "a free one is taken")


@pytest.mark.parametrize("name", ["hicache_storage_backend", "enable_lmcache"])
def test_caches_that_outlast_their_weights_are_refused_where_weights_come(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(arguments, "installed", lambda python: "0.5.21")
    monkeypatch.setattr(arguments, "_asked", lambda *_: {"unknown": [], "wrong": [], "known": []})
    ours, attached = SglangConfig(engine_args={name: "file"}), SglangConfig(base_url="http://h:1")
    (line,) = map(str, SglangBackend.check(ours, CONTEXT))
    says(line, f"strategy_config.{name}: its caches outlast the weights", "Fix: leave it out")
    (line,) = attach_problems(attached, CONTEXT, {**FACTS, name: "file"})
    assert f"runs with {name}: its caches outlast the weights" in line
    assert SglangBackend.check(ours, evolve(CONTEXT, updates=False)) == []
    assert attach_problems(attached, evolve(CONTEXT, updates=False), {**FACTS, name: "file"}) == []
    assert SglangBackend.check(SglangConfig(engine_args={name: None}), CONTEXT) == []


def test_an_interpreter_that_cannot_be_asked_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arguments, "installed", lambda python: "0.5.21")
    (lack,) = SglangBackend.check(SglangConfig(python=sys.executable, engine_args={"some_of_its_own": 1}), CONTEXT)
    assert lack.machine and lack.text.startswith(
        "sglang's argument class could not be asked about some_of_its_own: ModuleNotFoundError"
    )


@pytest.mark.engines
def test_sglangs_own_argument_class_judges_the_rest() -> None:
    given = {
        "max_total_tokens": 1000,
        "sleep_on_idel": True,
        "stream_interval": "two",
        "grammar_backend": "none",
        "load_balance_method": "x",
    }
    lines = [
        str(problem)
        for problem in SglangBackend.check(SglangConfig(python=fixtures.interpreter(), engine_args=given), CONTEXT)
    ]
    assert len(lines) == 3
    assert "sglang has no argument 'sleep_on_idel'. Did you mean 'sleep_on_idle'?" in lines[0]
    assert "stream_interval: 'two': Expected `int`" in lines[1]
    assert "load_balance_method: 'x' is none of " in lines[2]


def test_a_name_of_vllm_is_answered_with_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "installed", lambda python: "0.5.21")
    (line,) = map(str, SglangBackend.check(SglangConfig(python="p", engine_args={"tensor_parallel_size": 2}), CONTEXT))
    says(line, "$.actor_infer.strategy_args.strategy_config", "'tensor_parallel_size'", "Fix: tp_size")


def test_an_interpreter_that_imports_sglang_only_as_for_a_cpu_is_asked_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"unknown": ["stream_intervall"], "wrong": [], "known": ["stream_interval"]}
    monkeypatch.setattr(arguments, "installed", lambda python: "0.5.21")
    monkeypatch.setattr(
        arguments,
        "_asked",
        lambda python, given, cpu: answer if cpu else "RuntimeError: operator torchvision::nms does not exist",
    )
    (line,) = map(str, SglangBackend.check(SglangConfig(python="p", engine_args={"stream_intervall": 2}), gpu(0, 1)))
    assert line.endswith(
        "sglang has no argument 'stream_intervall'. Did you mean 'stream_interval'? Fix: correct or remove it"
    )
    monkeypatch.setattr(arguments, "_asked", lambda python, given, cpu: f"no, {cpu}")
    (lack,) = SglangBackend.check(SglangConfig(python="p", engine_args={"stream_intervall": 2}), gpu(0, 1))
    assert lack.machine and lack.text.startswith(
        "sglang's argument class could not be asked about stream_intervall: no, False. Fix: "
    )


@pytest.mark.engines
@pytest.mark.matrix
def test_arguments_for_gpus_are_judged_on_a_machine_without_any() -> None:
    """There SGLang imports only as for a CPU."""
    (line,) = map(
        str,
        SglangBackend.check(
            SglangConfig(python=fixtures.interpreter(), engine_args={"stream_intervall": 2}), gpu(0, 1)
        ),
    )
    says(line, "$.actor_infer.strategy_args.strategy_config", "'stream_intervall'", "Did you mean 'stream_interval'?")


def test_adapters_alone_need_the_models_weights_and_one_copy_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    context = InferenceContext(None, None, lora=Lora(8, 16, ("q_proj", "model.layers.0.mlp.up_proj"), "adapter"))
    given = server_arguments(SglangConfig(), context, 1)
    assert (given["enable_lora"], given["max_lora_rank"], given["lora_backend"]) == (True, 8, "torch_native")
    assert given["lora_target_modules"] == ["q_proj", "up_proj"]
    assert arguments.modules("q_proj, v_proj") == ["q_proj", "v_proj"]
    for target in (None, "all-linear", r".*\.(q|k)_proj"):
        assert arguments.modules(target) == list(arguments.LINEAR)
    assert "enable_lora" not in server_arguments(SglangConfig(), CONTEXT, 1)
    assert "lora_backend" not in server_arguments(SglangConfig(), gpu(0, lora=context.lora), 1)
    monkeypatch.setattr(arguments, "installed", lambda python: "0.5.21")
    random, copies = map(str, SglangBackend.check(SglangConfig(python="p", load_format="dummy", dp_size=2), context))
    assert (
        "load_format: dummy, while adapters alone arrive: the model's weights would stay random. Fix: load_format: auto"
        in random
    )
    assert "dp_size: SGLang loads adapters into one copy of the model only" in copies
    attached = SglangConfig(base_url="http://h:1")
    context = evolve(CONTEXT, lora=context.lora)
    assert attach_problems(attached, context, {**FACTS, "enable_lora": True}) == []
    (line,) = attach_problems(attached, context, FACTS)
    assert (
        "the SGLang server at http://h:1 runs without enable_lora, so it takes no adapters alone. Fix: start it with"
        " enable_lora" in line
    )


def test_an_attached_server_is_judged_by_what_it_reports() -> None:
    config = SglangConfig(base_url="http://h:1", dp_size=2)
    facts = {**FACTS, "dp_size": 2, "tp_size": 4}
    assert attach_problems(config, CONTEXT, facts) == []
    (line,) = attach_problems(config, CONTEXT, {**facts, "enable_deterministic_inference": False})
    assert (
        "the SGLang server at http://h:1 runs without enable_deterministic_inference, so it ignores the seeds" in line
    )
    loose = SglangConfig(base_url="http://h:1", enable_deterministic_inference=False)
    assert attach_problems(loose, CONTEXT, {**FACTS, "enable_deterministic_inference": False}) == []


def test_an_attached_server_of_another_dtype_or_with_less_room_is_always_refused() -> None:
    config = SglangConfig(base_url="http://h:1")
    for dtype in ("auto", "half", "float32"):
        (line,) = attach_problems(config, CONTEXT, {**FACTS, "dtype": dtype})
        assert line.endswith(f"has the dtype {dtype}, the run bf16. Fix: start it with --dtype bfloat16")
    assert attach_problems(config, evolve(CONTEXT, dtype="fp16"), {**FACTS, "dtype": "half"}) == []
    (line,) = attach_problems(config, CONTEXT, {**FACTS, "max_req_input_len": 99})
    assert "takes 99 tokens, and sequence_length is 100. Fix: start it with --context-length 108, and a cache" in line


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"updates": False}, "no weights will be sent"),
        ({"lora": Lora(8, 16, None, "adapter")}, "only adapters will be sent"),
    ],
)
def test_an_attached_server_of_another_model_is_refused_where_no_whole_weights_come(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    config, facts = SglangConfig(base_url="http://h:1"), {**FACTS, "enable_lora": True, "model_path": "/other"}
    assert attach_problems(config, CONTEXT, facts) == []
    (line,) = attach_problems(config, evolve(CONTEXT, **changes), facts)
    says(line, "http://h:1", "has the model /other", why, "Fix: start it with --model-path /model")
    (tmp_path / "link").symlink_to("/model")
    assert attach_problems(config, evolve(CONTEXT, **changes), {**facts, "model_path": str(tmp_path / "link")}) == []


def test_the_key_of_a_server_of_ours_is_in_a_file_that_nobody_else_may_read() -> None:
    server = Server("/bin/cat", {"port": 1}, {}, 1)
    given = json.loads((server.folder / "arguments.json").read_text(encoding="utf-8"))
    assert given == {"port": 1, "api_key": server.key}
    assert server.folder.stat().st_mode & 0o077 == 0
    server.stop()


def test_options_for_a_server_of_ours_are_refused_beside_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    config = SglangConfig(base_url="h:1", api_key_env="NO_KEY", engine_args={"page_size": 2})
    given, address, key = SglangBackend.check(config, CONTEXT)
    assert "page_size cannot be given to a server that is attached to" in given.text
    assert "'h:1' is no address" in address.text
    assert key.machine


def build(config: SglangConfig, context: InferenceContext) -> SglangBackend:
    async def made() -> SglangBackend:
        return SglangBackend(config, context)

    return asyncio.run(made())


def test_what_it_cannot_be_built_with_is_reported_at_once() -> None:
    pytest.importorskip("turnwise_hf", reason="the model and its chat come from turnwise-hf")
    with pytest.raises(ConfigError, match="the sglang backend needs a model"):
        build(SglangConfig(), InferenceContext(None, None))
    with pytest.raises(ConfigError, match=r"= 2 devices was given 4\. Fix: dp_size"):
        build(SglangConfig(tp_size=2), fixtures.context(devices=(0, 1, 2, 3)))
    with pytest.raises(ConfigError, match=r"= 2 devices was given 3"):
        build(SglangConfig(tp_size=2), fixtures.context(devices=(0, 1, 2), updates=False))
    assert SglangBackend.transports(SglangConfig(dp_size=2), fixtures.context()) == ("safetensors",)


def test_an_evaluation_takes_one_server_of_those_that_the_role_has_devices_for() -> None:
    pytest.importorskip("turnwise_hf", reason="the model and its chat come from turnwise-hf")
    backend = build(SglangConfig(tp_size=2), fixtures.context(devices=(4, 5, 6, 7), updates=False))
    # What its server will be started with: it shows nowhere before one starts, and a GPU machine alone could start it.
    assert backend._context.devices == (4, 5)


def test_a_server_that_ends_at_once_is_reported_with_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This interpreter has no SGLang: the launcher's own error is what the log ends with."""
    pytest.importorskip("turnwise_hf", reason="the model and its chat come from turnwise-hf")
    if arguments.installed(sys.executable):
        pytest.skip("this interpreter has SGLang")

    fixtures.model()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the log of a server that did not start stays

    async def scene() -> list[Any]:
        backend = SglangBackend(SglangConfig(python=sys.executable), fixtures.context())
        from turnwise.contracts.inference import GeneratingArgs, Request
        from turnwise.data.trajectory import int32

        asked = [backend.generate(Request(seed, GeneratingArgs(), 4, ids=int32([1, 2]))) for seed in range(2)]
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
        await backend.close()
        return answers

    for error in asyncio.run(scene()):
        assert isinstance(error, EngineError)
        assert "SGLang did not start (exit code 1), log " in str(error)
        assert "ModuleNotFoundError: No module named " in str(error)
        assert "\n" not in str(error)
