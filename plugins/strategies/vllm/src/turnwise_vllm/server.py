"""A vLLM server over HTTP: one that the run starts and stops, or one that is already there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from turnwise.contracts.inference import InferenceContext
from turnwise.errors import ConfigError, EngineError, EngineLost
from turnwise.ports import free_port
from turnwise_vllm import adapters, memory
from turnwise_vllm.arguments import DTYPES, EXTENSION, TRANSFER, cpu_build, engine_arguments, environment
from turnwise_vllm.config import VllmConfig
from turnwise_vllm.images import Picture, features
from turnwise_vllm.requests import Answer

PARENT = "TURNWISE_VLLM_PARENT"
"""The environment variable by which the server knows the process that it ends with."""
_POLL = 0.25
_STOP = 20.0
_PROBE = 60.0
_WORDS = 2**17
"""Bytes of a server's log in which the reason of its end is looked for."""
_ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "pause": ("/pause", {"mode": "keep", "clear_cache": "false"}),
    "resume": ("/resume", {}),
    "start_update": ("/start_weight_update", {}),
    "update": ("/update_weights", {}),
    "finish_update": ("/finish_weight_update", {}),
    "set_version": ("/update_weight_version", {}),
    "sleep": ("/sleep", {"level": 1, "mode": "keep"}),
    "wake": ("/wake_up", {}),
}


class ServedEngine:
    """Talks to a server by vLLM's own routes; those of weights and pauses exist with VLLM_SERVER_DEV_MODE=1."""

    def __init__(self, config: VllmConfig, context: InferenceContext) -> None:
        self._config, self._context = config, context
        self._process: ServerProcess | None = None
        self._session: Any = None  # an aiohttp.ClientSession
        self._address = (config.base_url or "").rstrip("/")
        self._lost = ""
        self._version: str | None = None

    async def start(self) -> None:
        """Raises EngineError (nothing answers in time) or ConfigError (the server there was started otherwise than this run needs)."""
        import aiohttp  # comes with vLLM

        # As many at a time as there are episodes; none kept open, for the server closes idle ones and those of failed requests.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector)
        if self._config.mode == "server":
            self._process = ServerProcess(self._config, self._context)
            self._address = self._process.address
        await self._wait_until_healthy()
        if self._process is None:
            self._compare(await self._get("/server_info?config_format=json", _PROBE))
            await self.control("version")
        else:
            await self.control("set_version", new_version="0")
            if cpu_build() and self._config.pipeline_parallel_size > 1:
                await self._post("/collective_rpc", {"method": "prepare_pipeline"}, _PROBE)

    async def generate(self, ids: list[int], sampling: dict[str, Any], name: str, pictures: list[Picture], copy: int | None) -> Answer:
        """Raises EngineError. Cancelling closes the connection, and the server drops the request."""
        body: dict[str, Any] = {"request_id": name, "token_ids": ids, "sampling_params": sampling}
        if pictures:
            body["features"] = await asyncio.to_thread(features, pictures)
        if self._context.lora is not None:
            body["model"] = adapters.NAME
        headers = {} if copy is None else {"X-data-parallel-rank": str(copy)}
        told = await self._post("/inference/v1/generate", body, self._config.request_timeout, headers)
        choice = told["choices"][0]
        logprobs = [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or ()]
        spans = [_span(span) for span in choice["weight_versions"] or ()]
        return Answer(choice["token_ids"] or [], logprobs, spans, choice["finish_reason"] or "stop")

    async def control(self, step: str, **arguments: Any) -> Any:
        """Raises EngineError."""
        timeout = self._context.weight_sync_timeout
        match step:
            case "version":
                self._version = (await self._get("/weight_info", timeout))["weight_version"]
                return self._version
            case "reset_cache":
                await self._post("/reset_encoder_cache", {}, timeout)
                return (await self._post("/reset_prefix_cache?reset_running_requests=true", {}, timeout))["success"]
            case "load_adapters":
                return (await self._post("/collective_rpc", {"method": "load_adapters", "args": [arguments["folder"]]}, timeout))["results"]
            case "begin_adapters":
                return await self._begin_adapters(timeout)
            case "start_update":
                await self._post("/init_weight_transfer_engine", {"init_info": {}}, timeout)
            case "update":
                arguments = {"update_info": arguments["info"]}
            case "finish_update":
                arguments = {"weight_version": arguments["version"]}
        path, query = _ROUTES[step]
        return await self._post(f"{path}?{urlencode(query)}" if query else path, arguments, timeout)

    async def _begin_adapters(self, timeout: float) -> None:
        """The server learns the adapters' name, which requests give as their model; what is behind it is replaced in the workers."""
        await self._post("/collective_rpc", {"method": "begin_adapters", "args": [1]}, timeout)
        try:
            await self._post("/v1/load_lora_adapter", {"lora_name": adapters.NAME, "lora_path": adapters.ZEROS}, timeout)
        except _AlreadyLoaded:
            return
        except EngineLost:
            raise
        except EngineError as error:  # ours are not its first, so it gave them another number, under which the workers have none
            raise EngineError(f"the vLLM server at {self._address} has had other adapters before this run's. Fix: start it anew") from error

    async def close(self) -> None:
        """Close the connections; stop the server if the run started it."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.stop)

    async def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self._config.start_timeout
        while True:
            with contextlib.suppress(EngineError):
                await self._ask("GET", "/health", None, _PROBE)
                return
            if self._process is not None and (said := self._process.ended()) is not None:
                raise EngineError(memory.told(f"the vLLM server did not start: {said}", self._process.words(), "the start"))
            if self._process is None or time.monotonic() > deadline:
                where = f"the vLLM server at {self._address} does not answer"
                raise EngineError(f"{where}. Fix: start it, correct base_url" if self._process is None else f"{where} within start_timeout")
            await asyncio.sleep(_POLL)

    def _compare(self, told: Mapping[str, Any]) -> None:
        """Raises ConfigError with everything in which the server differs from what this run needs."""
        config = told["vllm_config"]
        model, transfer = config["model_config"], config.get("weight_transfer_config") or {}
        wrong = []
        if self._context.needs_its_model and not self._context.is_model(str(model["model"])):
            why = "only adapters will be sent" if self._context.lora is not None else "no weights will be sent"
            wrong.append(f"--model {Path(str(self._context.model)).resolve()} (it has {model['model']}, and {why})")
        if (dtype := str(model["dtype"]).removeprefix("torch.")) != DTYPES[self._context.dtype]:
            wrong.append(f"--dtype {DTYPES[self._context.dtype]} (it has {dtype})")
        if self._context.lora is not None:
            wanted = adapters.engine_arguments(self._context.lora)["max_lora_rank"]
            rank = (config.get("lora_config") or {}).get("max_lora_rank", 0)
            if rank < wanted:
                wrong.append(f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 before it and --enable-lora --max-lora-rank {wanted} after it")
        if model["logprobs_mode"] != self._config.logprobs_mode:
            wrong.append(f"--logprobs-mode {self._config.logprobs_mode} (it has {model['logprobs_mode']})")
        if transfer.get("backend") != TRANSFER:
            wrong.append(f"""--weight-transfer-config '{{"backend": "{TRANSFER}"}}' --worker-extension-cls {EXTENSION}""")
        if (model.get("multimodal_config") or {}).get("mm_device_do_normalize"):
            wrong.append("--no-mm-device-do-normalize")
        longest = self._config.max_model_len or self._context.sequence_length
        if model["max_model_len"] < longest:
            wrong.append(f"--max-model-len {longest} (it has {model['max_model_len']})")
        parallel, sizes = config.get("parallel_config") or {}, engine_arguments(self._config, self._context, False)
        for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if parallel.get(key, sizes[key]) != sizes[key]:
                where = f"the vLLM server at {self._address} has {key} {parallel[key]}, the configuration {sizes[key]}"
                raise ConfigError(f"{where}. Fix: write the server's into strategy_config")
        if wrong:
            raise ConfigError(f"the vLLM server at {self._address} does not fit this run. Fix: start it with {' '.join(wrong)}")

    async def _get(self, path: str, timeout: float) -> Any:
        return await self._ask("GET", path, None, timeout)

    async def _post(self, path: str, body: Any, timeout: float, headers: Mapping[str, str] | None = None) -> Any:
        return await self._ask("POST", path, body, timeout, headers)

    async def _ask(self, method: str, path: str, body: Any, timeout: float, headers: Mapping[str, str] | None = None) -> Any:
        import aiohttp

        if self._session is None:
            raise EngineError("the backend was closed")
        if self._lost:
            raise EngineLost(self._lost)  # what answers at its address by now has other weights
        try:
            limit = aiohttp.ClientTimeout(timeout)
            async with self._session.request(method, self._address + path, json=body, headers=headers, timeout=limit) as answer:
                text = await answer.text()
                status = answer.status
        except TimeoutError as error:
            raise EngineError(f"the vLLM server did not answer {path} within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            ended = self._process.ended() if self._process is not None else None
            if ended is None and path != "/health" and await self._unchanged():
                raise EngineError(f"the vLLM server broke off {path.partition('?')[0]} ({error})") from error
            raise self._gone(f"the vLLM server at {self._address} is gone ({ended or error})", path) from error
        if status == 200:
            return json.loads(text) if text.startswith(("{", "[")) else text
        told = f"the vLLM server answered {path.partition('?')[0]} with {status}: {_reason(text)}."
        if status >= 500 and path != "/health" and not await self._healthy():
            why = "Fix: see its log" if self._process is None else self._process.last()
            raise self._gone(f"{told} Its engine died. {why}", path)
        if "has already been loaded" in text:
            raise _AlreadyLoaded(told)
        if status == 404:
            raise EngineError(f"{told} Fix: start the server with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out")
        raise EngineError(memory.told(told, "", memory.phase(path)))

    def _gone(self, told: str, path: str) -> EngineLost:
        told = memory.told(told, "" if self._process is None else self._process.words(), memory.phase(path))
        if path != "/health":  # which is asked before it is there, too
            self._lost = told
        return EngineLost(told)

    async def _unchanged(self) -> bool:
        """Whether the server answers, and is the one of before: another at its address would have other weights."""
        if not await self._healthy():
            return False
        if self._process is not None:
            return True
        try:
            return (await self._get("/weight_info", _PROBE))["weight_version"] == self._version
        except EngineError:
            return False

    async def _healthy(self) -> bool:
        try:
            await self._ask("GET", "/health", None, _PROBE)
        except EngineError:
            return False
        return True


class _AlreadyLoaded(EngineError):
    """The server knows an adapter of that name."""


class ServerProcess:
    """vLLM's server as a child process on a free port of the loopback interface; its messages go to a file, the last are told on failure."""

    def __init__(self, config: VllmConfig, context: InferenceContext) -> None:
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        cpu = cpu_build()
        variables = {**os.environ, **environment(config, cpu), "VLLM_SERVER_DEV_MODE": "1", PARENT: str(os.getpid())}
        if context.lora is not None:
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if config.python_path:
            variables["PYTHONPATH"] = os.pathsep.join([*config.python_path, *filter(None, [os.environ.get("PYTHONPATH")])])
        if context.devices and not cpu:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, context.devices))
        self._log = tempfile.NamedTemporaryFile(prefix="turnwise-vllm-", suffix=".log")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            server_command(engine_arguments(config, context, cpu), port),
            env=variables,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own: a keyboard interrupt is for us, and its children end with it
        )

    def ended(self) -> str | None:
        """How it ended and what it said last, None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"its process ended with code {code}{memory.killed(code)}: {self.last()}"

    def last(self) -> str:
        """The last error that it told, or its last line."""
        lines = [line.strip() for line in self.words().splitlines() if line.strip()]
        errors = [line for line in lines if "Error: " in line]
        # The server's own error after that of its engine only points to it.
        told = [line for line in errors if "See root cause above" not in line] or errors or lines
        return told[-1][:400] if told else "it said nothing"

    def words(self) -> str:
        """The end of what it said."""
        with Path(self._log.name).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _WORDS))
            return log.read().decode("utf-8", errors="replace")

    def stop(self) -> None:
        """End it and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(_STOP)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_STOP)
        self._log.close()


def server_command(arguments: Mapping[str, Any], port: int) -> list[str]:
    """The command line of vLLM's server with these engine arguments."""
    command = [sys.executable, "-m", "turnwise_vllm.serve", "--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"]
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            command.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, (dict, list)):
            command += [option, json.dumps(value)]
        elif value is not None:
            command += [option, str(value)]
    return command


def _span(span: Any) -> tuple[str, int, int]:
    return (span["version"], span["start"], span["end"]) if isinstance(span, dict) else (span[0], span[1], span[2])


def _reason(text: str) -> str:
    try:
        told = json.loads(text)
    except ValueError:
        return text.strip()[:300] or "no reason"
    error = told.get("error", told) if isinstance(told, dict) else told
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
