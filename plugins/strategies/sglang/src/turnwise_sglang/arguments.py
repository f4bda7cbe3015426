"""From options and context to SGLang's server arguments and environment, and what its own argument class says to
them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from turnwise.contracts.inference import InferenceContext
from turnwise.contracts.train import Lora
from turnwise.errors import Problem, did_you_mean
from turnwise_serving.models import DTYPES, sees
from turnwise_serving.process import ENGINE, TOOLS, visible
from turnwise_sglang.config import SglangConfig

WHERE = "actor_infer.strategy_args.strategy_config"
"""The block of the configuration in which the options stand."""
# Run as a file: the interpreter that has SGLang has nothing of Turnwise to import.
LAUNCHER = Path(__file__).with_name("engine") / "turnwise_serve.py"
OLDEST = "0.5.21"
"""The first version whose weight updates are sessions (begin_weight_update)."""
OURS = {
    "model_path": "pretrain",
    "weight_version": "the backend counts versions",
    "host": "the server listens on loopback",
}
OURS |= {"port": "a free one is taken", "dtype": "model_args.dtype", "tokenizer_path": "pretrain"}
OURS |= {
    "skip_server_warmup": "it is on",
    "nnodes": "one server is on one host",
    "api_key": "each start makes its own",
}
OURS |= {"trust_remote_code": "trust_remote_code, beside pretrain"}
OURS |= {"enable_lora": "actor_train.model_args.lora_sync", "lora_paths": "pretrain"}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What a server makes room for where the target names no modules: the linear layers of the architectures that SGLang has adapters for."""
_FIELDS = (
    "tp_size",
    "pp_size",
    "dp_size",
    "mem_fraction_static",
    "load_format",
    "chunked_prefill_size",
    "max_running_requests",
    "disable_radix_cache",
    "disable_cuda_graph",
    "enable_deterministic_inference",
)
STALE = "its caches outlast the weights they were computed with, and would be read after an update"
OUTLASTING = ("hicache_storage_backend", "enable_lmcache")
"""What keeps caches outside the server, where flushing does not reach them; they are found again by their ids alone."""
_ELSEWHERE = {"tensor_parallel_size": "tp_size", "pipeline_parallel_size": "pp_size", "data_parallel_size": "dp_size"}
_ELSEWHERE |= {
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
}
"""vLLM's names, which are far from SGLang's."""
SPARE = 8
"""SGLang keeps a few positions of its context for itself; a response may fill sequence_length to the last token."""
# Room of the KV cache in tokens, of which SGLang would take as much as the memory holds.
_CPU_TOKENS = 65536
SAVER = "torch_memory_saver"
"""The package that gives device memory back; SGLang for GPUs brings it."""
_CPU: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    # With OMP_NUM_THREADS=1 it took one batch from 13 s to 0.13 s: spinning processes take the cores from each other.
    "sleep_on_idle": True,
    "mem_fraction_static": 0.8,
}


def interpreter(config: SglangConfig) -> str:
    """The Python that runs SGLang."""
    return config.python or sys.executable


def device(config: SglangConfig, context: InferenceContext) -> str | None:
    """SGLang's device: the option, else the CPU where the role has no devices, else the engine's choice (None)."""
    return config.device or (None if context.devices else "cpu")


def server_arguments(config: SglangConfig, context: InferenceContext, port: int) -> dict[str, Any]:
    """The arguments of a server for this role on `port`; what the user wrote wins over our defaults."""
    given = {name: value for name in _FIELDS if (value := getattr(config, name)) is not None}
    on = device(config, context)
    # Ids go in and out: SGLang needs neither a tokenizer nor grammars.
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "log_level": "warning", "grammar_backend": "none"}
    if on == "cpu":
        defaults |= {**_CPU, "max_total_tokens": max(_CPU_TOKENS, 2 * (context.sequence_length + SPARE))}
    if sees(context.model):
        # torchvision's gives other pixels than the trainer's.
        defaults["disable_fast_image_processor"] = True
    if on is not None:
        given["device"] = on
    if context.lora is not None:
        defaults |= lora_arguments(context.lora, on)
    if config.sleeps(context):
        # Without the backup the weights would be gone with the memory, and only the trainer's next update brings
        # others.
        given |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    fixed = {
        "model_path": str(context.model),
        "dtype": DTYPES[context.dtype],
        "context_length": config.context_length or context.sequence_length + SPARE,
        "random_seed": context.seed % 2**31,
        "trust_remote_code": context.trust_remote_code,
        "host": "127.0.0.1",
        "port": port,
        "weight_version": "0",
        "skip_server_warmup": True,
    }
    # Later ones win: what the user wrote stands last.
    return {**defaults, **fixed, **given, **config.engine_args}


def lora_arguments(lora: Lora, on: str | None) -> dict[str, Any]:
    """Room for one adapter beside the model."""
    # Two adapters: a new one is loaded before the last one leaves.
    room = {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": modules(lora.target),
        "max_loras_per_batch": 2,
    }
    return room | ({"lora_backend": "torch_native"} if on == "cpu" else {})


def modules(target: str | tuple[str, ...] | None) -> list[str]:
    """The modules for which a server has to make room, for the target of the actor's adapters."""
    names = target.split(",") if isinstance(target, str) else target or ()
    # A regular expression names no modules: there is room for all linear layers then.
    plain = [name.strip().rpartition(".")[2] for name in names]
    return plain if plain and all(name.isidentifier() for name in plain) else list(LINEAR)


def environment(config: SglangConfig, context: InferenceContext) -> dict[str, str]:
    """The server's environment: this process's, without what belongs to this interpreter, with the role's devices."""
    values = dict(os.environ)
    if config.python and Path(config.python).absolute() != Path(sys.executable).absolute():
        # Packages of this interpreter must not be imported by another.
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            values.pop(name, None)
    # Log-probs before the temperature would be another quantity than ours.
    values.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)
    # context_length may exceed the model's own by SPARE. Unbuffered, the log holds a dying server's last words.
    values |= {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "PYTHONUNBUFFERED": "1"}
    if sees(context.model):
        # Flushing spares it: after an update it would give the old weights' features of an image.
        values["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    if device(config, context) == "cpu":
        values |= {
            "TURNWISE_SGLANG_CPU": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1",
        }
        values.setdefault("OMP_NUM_THREADS", "1")
        if (ranks := config.devices_per_engine) > 1:
            values.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores(ranks))
    elif context.devices:
        values["CUDA_VISIBLE_DEVICES"] = visible(context.devices)
    return values


def _cores(ranks: int) -> str:
    """This process's CPU cores, dealt out to so many ranks, in SGLang's words. By default it has room for one rank on
    each NUMA node only."""
    mine = sorted(os.sched_getaffinity(0))
    each = max(1, len(mine) // ranks)
    return "|".join(
        ",".join(str(mine[place % len(mine)]) for place in range(rank * each, (rank + 1) * each))
        for rank in range(ranks)
    )


def installed(python: str, name: str = "sglang") -> str:
    """A package's version in that interpreter, found without importing it; "" where it has none. Raises OSError: there
    is no such program."""
    code = (
        f"import importlib.util as u, importlib.metadata as m; print(m.version({name!r}) if u.find_spec({name!r})"
        " else '')"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{python} did not answer within 60 s") from error
    return done.stdout.strip() if done.returncode == 0 else ""


def machine_problem(config: SglangConfig) -> Problem | None:
    """Why this machine cannot start the server, if it cannot."""
    python, where = interpreter(config), f"{WHERE}.python"
    fix = (
        "Fix: install SGLang there (requirements/sglang.txt in an environment of its own), or name its interpreter as"
        " strategy_config.python"
    )
    try:
        version = installed(python)
    except OSError as error:
        return Problem(where, f"{python!r} cannot be run ({error}). {fix}", machine=True)
    if not version:
        return Problem(where, f"{python} has no sglang. {fix}", machine=True)
    try:
        old = Version(version) < Version(OLDEST)
    except InvalidVersion:
        return None
    return (
        Problem(where, f"{python} has sglang {version}, {OLDEST} or newer is needed. {fix}", machine=True)
        if old
        else None
    )


def memory_problems(config: SglangConfig, context: InferenceContext) -> list[Problem]:
    """What keeps `enable_memory_saver` from giving memory back in an interpreter that has SGLang."""
    if not config.sleeps(context):
        return []
    where = f"{WHERE}.enable_memory_saver"
    if device(config, context) == "cpu":
        return [
            Problem(
                where, "there is no device memory to give back on a CPU. Fix: false, or name GPUs in device_mapping"
            )
        ]
    if installed(interpreter(config), SAVER):
        return []
    lack = (
        f"needs the package {SAVER}, which {interpreter(config)} lacks. Fix: install it there, or enable_memory_saver:"
        " false"
    )
    return [Problem(where, lack, machine=True)]


def argument_problems(config: SglangConfig, context: InferenceContext) -> list[Problem]:
    """What is wrong with `engine_args`: names that are this backend's to set, and what SGLang's own argument class
    refuses."""
    given = config.engine_args
    problems = [
        Problem(f"{WHERE}.{name}", f"not the user's to set ({use}). Fix: leave it out")
        for name, use in OURS.items()
        if name in given
    ]
    problems += [
        Problem(f"{WHERE}.{name}", f"{STALE}. Fix: leave it out")
        for name in OUTLASTING
        if context.updates and given.get(name)
    ]
    problems += [
        Problem(WHERE, f"sglang has no argument {name!r}. Fix: {_ELSEWHERE[name]}")
        for name in given
        if name in _ELSEWHERE
    ]
    left = {name: value for name, value in config.engine_args.items() if name not in OURS and name not in _ELSEWHERE}
    if not left:
        return problems
    text = json.dumps(left, default=str)
    answer = _asked(interpreter(config), text, device(config, context) == "cpu")
    if isinstance(answer, str) and not isinstance(other := _asked(interpreter(config), text, True), str):
        # On this machine it can be imported as for a CPU only; its argument class is the same.
        answer = other
    if isinstance(answer, str):
        lack = f"sglang's argument class could not be asked about {', '.join(left)}: {answer}. Fix: repair"
        lack += f" what {interpreter(config)} has, or remove them"
        return [*problems, Problem(WHERE, lack, machine=True)]
    known = [*answer["known"], *SglangConfig.__annotations__]
    problems += [
        Problem(WHERE, f"sglang has no argument {name!r}.{did_you_mean(name, known)} Fix: correct or remove it")
        for name in answer["unknown"]
    ]
    return problems + [Problem(WHERE, f"{line}. Fix: correct the value") for line in answer["wrong"]]


@functools.cache
def _asked(python: str, arguments: str, cpu: bool) -> dict[str, list[str]] | str:
    """The answer of the interpreter's own argument class, or why there is none."""
    values = {**os.environ, TOOLS: str(ENGINE)}
    if cpu:
        values |= {"TURNWISE_SGLANG_CPU": "1", "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(arguments)
        file.flush()
        try:
            command = [python, str(LAUNCHER), "check", file.name]
            done = subprocess.run(
                command, env=values, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, check=False
            )
            answer: dict[str, list[str]] = json.loads(done.stdout.strip().splitlines()[-1])
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        except (ValueError, IndexError):
            return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return answer
