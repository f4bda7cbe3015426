"""A vLLM server over HTTP: one that the run starts and stops, or one that is already there."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from turnwise.contracts.inference import InferenceContext
from turnwise.errors import ConfigError, EngineError, EngineLost, listed
from turnwise_serving.endpoint import key_from
from turnwise_serving.health import until_healthy
from turnwise_serving.http import Client, Gone, Slow, reason
from turnwise_serving.models import DTYPES, other_model
from turnwise_serving.running import CLOSED
from turnwise_vllm import adapters
from turnwise_vllm.arguments import EXTENSION, TRANSFER, cpu_build, engine_arguments
from turnwise_vllm.config import VllmConfig
from turnwise_vllm.connectors import outlasting
from turnwise_vllm.images import Picture, features
from turnwise_vllm.memory import MEMORY
from turnwise_vllm.process import Server
from turnwise_vllm.requests import Answer

# Seconds for questions that a live server answers at once.
_PROBE = 60.0
_ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "pause": ("/pause", {"mode": "keep", "clear_cache": "false"}),
    "resume": ("/resume", {}),
    "start_update": ("/start_weight_update", {}),
    "update": ("/update_weights", {}),
    "finish_update": ("/finish_weight_update", {}),
    "set_version": ("/update_weight_version", {}),
    "sleep": ("/sleep", {"level": 1, "mode": "keep"}),
}


class ServedEngine:
    """Talks to a server by vLLM's own routes; those of weights and pauses exist with VLLM_SERVER_DEV_MODE=1."""

    def __init__(self, config: VllmConfig, context: InferenceContext) -> None:
        self._config, self._context = config, context
        self._process: Server | None = None
        self._client: Client | None = None
        self._address = (config.base_url or "").rstrip("/")
        self._lost = ""
        self._version: str | None = None

    async def start(self) -> None:
        """Raises EngineError (nothing answers in time) or ConfigError (the server there was started otherwise than this
        run needs)."""
        if self._config.mode == "server":
            self._process = Server(self._config, self._context)
            self._address = self._process.url
        # No connection is kept open, for the server closes idle ones and those of failed requests.
        key = key_from(self._config.api_key_env) if self._process is None else self._process.key
        self._client = Client(self._address, self._config.request_timeout, key, keep_alive=0)
        if self._process is not None:
            await until_healthy(self._process, self._client, self._config.start_timeout, lambda: self._client is None)
        elif not await self._healthy():
            raise EngineError(f"the vLLM server at {self._address} does not answer. Fix: start it, correct base_url")
        if self._process is None:
            # Only what others started may differ from the run.
            self.compare(await self._get("/server_info?config_format=json", _PROBE))
            await self.control("version")
        else:
            await self.control("set_version", new_version="0")
            # The warm-up that would do it is left out on a CPU (see WorkerExtension.prepare_pipeline).
            if cpu_build() and self._config.pipeline_parallel_size > 1:
                await self._post("/collective_rpc", {"method": "prepare_pipeline"}, _PROBE)

    async def generate(
        self, ids: list[int], sampling: dict[str, Any], name: str, pictures: list[Picture], copy: int | None
    ) -> Answer:
        """Raises EngineError. Cancelling closes the connection, and the server drops the request."""
        body: dict[str, Any] = {"request_id": name, "token_ids": ids, "sampling_params": sampling}
        if pictures:
            # Off the event loop: pixels are encoded as text.
            body["features"] = await asyncio.to_thread(features, pictures)
        if self._context.lora is not None:
            body["model"] = adapters.NAME
        # vLLM deals requests out itself where the header is missing, wherever their beginning is cached.
        headers = {} if copy is None else {"X-data-parallel-rank": str(copy)}
        # No limit here: who waits gives up, by a clock that stands still while the engine is paused.
        response = await self._post("/inference/v1/generate", body, math.inf, headers)
        choice = response["choices"][0]
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
                path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
                return (await self._post(path, {}, timeout))["success"]
            case "load_adapters":
                return (
                    await self._post(
                        "/collective_rpc", {"method": "load_adapters", "args": [arguments["folder"]]}, timeout
                    )
                )["results"]
            case "begin_adapters":
                return await self._begin_adapters(timeout)
            case "start_update":
                # Before every update: a server that was started anew at this address has not been initialised.
                await self._post("/init_weight_transfer_engine", {"init_info": {}}, timeout)
            case "update":
                arguments = {"update_info": arguments["info"]}
            case "finish_update":
                arguments = {"weight_version": arguments["version"]}
            case "wake":
                return await self._post(f"/wake_up?{urlencode({'tags': arguments['tag']})}", {}, timeout)
        path, query = _ROUTES[step]
        return await self._post(f"{path}?{urlencode(query)}" if query else path, arguments, timeout)

    async def _begin_adapters(self, timeout: float) -> None:
        """The server learns the adapters' name, which requests give as their model; what is behind it is replaced in
        the workers."""
        await self._post("/collective_rpc", {"method": "begin_adapters", "args": [1]}, timeout)
        try:
            await self._post(
                "/v1/load_lora_adapter", {"lora_name": adapters.NAME, "lora_path": adapters.ZEROS}, timeout
            )
        except _AlreadyLoaded:
            return
        except EngineLost:
            raise
        # Ours are not its first, so it gave them another number, under which the workers have none.
        except EngineError as error:
            raise EngineError(
                f"the vLLM server at {self._address} has had other adapters before this run's. Fix: start it anew"
            ) from error

    async def close(self) -> None:
        """Close the connections; stop the server if the run started it."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.stop)

    def compare(self, info: Mapping[str, Any]) -> None:
        """Raises ConfigError with everything in which the server differs from what this run needs."""
        config = info["vllm_config"]
        model, transfer = config["model_config"], config.get("weight_transfer_config") or {}
        wrong = []
        if why := other_model(self._context, str(model["model"])):
            wrong.append(f"--model {Path(str(self._context.model)).resolve()} (it has {model['model']}, and {why})")
        if (dtype := str(model["dtype"]).removeprefix("torch.")) != DTYPES[self._context.dtype]:
            wrong.append(f"--dtype {DTYPES[self._context.dtype]} (it has {dtype})")
        if self._context.lora is not None:
            # vLLM takes a few ranks only: the least that holds the run's.
            wanted = adapters.engine_arguments(self._context.lora)["max_lora_rank"]
            rank = (config.get("lora_config") or {}).get("max_lora_rank", 0)
            if rank < wanted:
                wrong.append(
                    f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 before it and --enable-lora --max-lora-rank {wanted} after it"
                )
        if model["logprobs_mode"] != self._config.logprobs_mode:
            wrong.append(f"--logprobs-mode {self._config.logprobs_mode} (it has {model['logprobs_mode']})")
        if transfer.get("backend") != TRANSFER:
            wrong.append(
                f"""--weight-transfer-config '{{"backend": "{TRANSFER}"}}' --worker-extension-cls {EXTENSION}"""
            )
        if (model.get("multimodal_config") or {}).get("mm_device_do_normalize"):
            wrong.append("--no-mm-device-do-normalize")
        if self._context.updates and (left := outlasting(config.get("kv_transfer_config"))):
            raise ConfigError(
                f"the vLLM server at {self._address} keeps what {listed(left)} cached of old weights at an update. Fix:"
                " start it without --kv-transfer-config"
            )
        longest = self._config.max_model_len or self._context.sequence_length
        if model["max_model_len"] < longest:
            wrong.append(f"--max-model-len {longest} (it has {model['max_model_len']})")
        parallel, sizes = config.get("parallel_config") or {}, engine_arguments(self._config, self._context, False)
        for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if parallel.get(key, sizes[key]) != sizes[key]:
                where = f"the vLLM server at {self._address} has {key} {parallel[key]}, the configuration {sizes[key]}"
                raise ConfigError(f"{where}. Fix: write the server's into strategy_config")
        if wrong:
            raise ConfigError(
                f"the vLLM server at {self._address} does not fit this run. Fix: start it with {' '.join(wrong)}"
            )

    async def _get(self, path: str, timeout: float) -> Any:
        return await self._ask("GET", path, None, timeout)

    async def _post(self, path: str, body: Any, timeout: float, headers: Mapping[str, str] | None = None) -> Any:
        return await self._ask("POST", path, body, timeout, headers)

    async def _ask(
        self, method: str, path: str, body: Any, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Any:
        if self._client is None:
            raise EngineError(CLOSED)
        if self._lost:
            # What answers at its address by now has other weights.
            raise EngineLost(self._lost)
        route = path.partition("?")[0]
        try:
            answer = await self._client.send(method, path, body, timeout, headers)
        except Slow as error:
            raise EngineError(f"the vLLM server did not answer {path} within {timeout:g} s") from error
        except Gone as error:
            ended = self._ended()
            # A connection may break while the server lives on: then this request alone has failed.
            if not ended and await self._unchanged():
                raise EngineError(f"the vLLM server broke off {route} ({error})") from error
            raise self._gone(f"the vLLM server at {self._address} is gone ({ended or error})", path) from error
        status, text = answer.status_code, answer.text
        if status == 200:
            return json.loads(text) if text.startswith(("{", "[")) else text
        refused = f"the vLLM server answered {route} with {status}: {reason(text)}."
        # A live server may fail one request; one that is no longer healthy has lost its engine, and all others with it.
        if status >= 500 and not await self._healthy():
            why = "Fix: see its log" if self._process is None else self._process.tail()
            raise self._gone(f"{refused} Its engine died. {why}", path)
        if "has already been loaded" in text:
            raise _AlreadyLoaded(refused)
        if status in (401, 403):
            raise EngineError(f"{refused} Fix: strategy_config.api_key_env")
        # The routes of weights and of token ids are there only with these two.
        if status == 404:
            raise EngineError(f"{refused} Fix: start the server with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out")
        raise EngineError(MEMORY.explained(refused, "", MEMORY.phase(path)))

    def _ended(self) -> str:
        """How the server of this run ended; empty while it runs, and for one that was attached to."""
        if self._process is None or self._process.alive:
            return ""
        return f"its process ended with {self._process.how_it_ended()}: {self._process.tail()}"

    def _gone(self, what: str, path: str) -> EngineLost:
        self._lost = MEMORY.explained(what, "" if self._process is None else self._process.words(), MEMORY.phase(path))
        return EngineLost(self._lost)

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
        return self._client is not None and await self._client.healthy(_PROBE)


class _AlreadyLoaded(EngineError):
    """The server knows an adapter of that name."""


def _span(span: Any) -> tuple[str, int, int]:
    return (span["version"], span["start"], span["end"]) if isinstance(span, dict) else (span[0], span[1], span[2])
