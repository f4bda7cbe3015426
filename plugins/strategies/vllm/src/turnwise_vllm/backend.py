"""Inference with vLLM: requests in token ids to an engine in this process or to a server, weights taken in place between two tokens."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, Literal

import numpy as np

from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import InferenceContext, Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation
from turnwise.errors import ConfigError, EngineError, MachineError, listed
from turnwise.rollout.homes import Homes
from turnwise_vllm.adapters import Folder
from turnwise_vllm.arguments import cpu_build, model_facts, problems, replicas, sees
from turnwise_vllm.config import VllmConfig
from turnwise_vllm.engine import Engine, LocalEngine
from turnwise_vllm.images import Picture, Pictures
from turnwise_vllm.requests import generation, number, prompt_ids, sampling
from turnwise_vllm.server import ServedEngine


class VllmBackend:
    """`turnwise.contracts.inference.InferenceBackend` with vLLM.

    The engine starts at the first use. Equal seeds, weights and ids give equal tokens in any batch, beyond rounding. Tokens sampled before
    an update keep their version; those after it are sampled from a cache that was computed again with the new weights.
    """

    input: Literal["ids", "messages"] = "ids"
    transports: tuple[str, ...] = ("shared_memory", "process_group", "safetensors")
    adapters = True

    def __init__(self, config: VllmConfig, context: InferenceContext) -> None:
        """Raises ConfigError or MachineError; nothing is started."""
        if context.model is None or context.chat is None:
            raise ConfigError("actor_infer: the vllm backend needs a model and its chat. Fix: name a folder, a hub id or a recipe as pretrain")
        found = problems(config, context)
        if wrong := [line for line in found if not line.startswith("machine: ")]:
            raise ConfigError(wrong)
        if found:
            raise MachineError("\n".join(line.removeprefix("machine: ") for line in found))
        self._config, self._context = config, context
        self._chat: Chat = context.chat
        facts = model_facts(Path(context.model))
        self._vocabulary = int(facts["vocab_size"])
        self._pictures: Pictures | None = None
        self._longest = min(config.max_model_len or context.sequence_length, context.sequence_length)
        if context.devices and not cpu_build():
            self.transports = ("process_group", "shared_memory", "safetensors")  # from GPU to GPU, past the hosts' memory
        # Each worker reads weights for itself; adapters are read here, for all of them.
        self.receivers = config.devices_per_engine * replicas(config, context) if context.lora is None else 1
        self._adapters = Folder() if context.lora is not None else None
        self._copies, self._homes = replicas(config, context), Homes()
        self._engine: Engine | None = None
        self._starting: asyncio.Task[Engine] | None = None
        self._running: dict[Request, asyncio.Task[Any]] = {}
        self._names = itertools.count()
        self._asleep = self._paused = self._closed = False
        self._empty = config.load_format == "dummy"
        self._broken = ""

    @staticmethod
    def check(config: VllmConfig, context: InferenceContext) -> list[str]:
        """What is wrong with the options, or (`machine: …`) missing here, one line each; vLLM's argument names are read from its source."""
        return problems(config, context)

    @staticmethod
    def cannot_sleep(config: VllmConfig) -> str:
        """Why `sleep` will be refused on GPUs."""
        awake = config.mode != "attach" and not config.enable_sleep_mode
        return "vLLM starts without sleep mode. Fix: strategy_config.enable_sleep_mode: true, or devices of its own" if awake else ""

    async def generate(self, request: Request) -> Generation:
        """Sample one response. Raises EngineError: a prompt without room or with ids outside the vocabulary, an engine that is gone."""
        ids = prompt_ids(request, self._vocabulary, self._longest)
        pictures = await self._seen(ids, request)
        self._refuse()
        if self._empty:
            raise EngineError(
                "load_format is dummy and no weights have come yet. Fix: load_format: auto, or a weight update before the first request"
            )
        engine = await self._started()
        fields = sampling(request, self._longest - len(ids), self._chat.stop_ids)
        with self._homes.of(request, range(self._copies)) as copy:
            name = f"turnwise-{id(self)}-{next(self._names)}"
            task = asyncio.ensure_future(engine.generate(ids.tolist(), fields, name, pictures, copy if self._copies > 1 else None))
            self._running[request] = task
            try:
                answer = await task
            except asyncio.CancelledError:
                self._refuse()  # cancelled from here, because nothing more is served
                raise
            finally:
                self._running.pop(request, None)
                task.cancel()
        return generation(answer, request, self._chat, self._config.logprobs_mode)

    def live(self, episodes: int) -> None:
        """Nothing to do: vLLM batches what is there at every token."""

    async def receive(self, offer: Offer) -> int:
        """Take the offered weights in place: `shared_memory` or `process_group` (payload of turnwise_torch.stream or .broadcast), or `safetensors`
        (payload `folder`).

        Between two tokens; the cache of the old weights is dropped, and sequences in progress are read again. Raises EngineError; after a
        failed update the engine holds a mixture, so requests fail until a whole one has come.
        """
        if offer.transport not in self.transports:
            raise EngineError(f"the vllm backend cannot receive weights by {offer.transport!r}. Known: {listed(self.transports)}")
        if self._asleep:
            raise EngineError("the backend sleeps. Fix: wake it before a weight update")
        if (offer.adapter is None) != (self._adapters is None):
            kinds = ("whole weights", "adapters alone") if offer.adapter is None else ("adapters alone", "whole weights")
            raise EngineError(f"the weight update brings {kinds[0]}, and vLLM was started for {kinds[1]}")
        engine = await self._started()
        if not self._paused:
            await engine.control("pause")
        try:
            await self._update(engine, offer)
        except BaseException:
            held = "a mixture of weights" if self._adapters is None else "nobody knows which adapters"
            self._broken = f"the last weight update failed, so the engine holds {held}. Fix: a whole update, or another start"
            for task in self._running.values():
                task.cancel()
            raise
        finally:
            if not self._paused:
                await engine.control("resume")
        self._empty, self._broken = False, ""
        return offer.version

    async def _update(self, engine: Engine, offer: Offer) -> None:
        if self._adapters is not None:
            folder = await asyncio.to_thread(self._adapters.write, offer, self._context.weight_sync_timeout)
            await self._load_adapters(engine, folder)
            await engine.control("set_version", new_version=str(offer.version))
        else:
            where = {"folder": str(offer.payload["folder"])} if offer.transport == "safetensors" else {"payload": dict(offer.payload)}
            await engine.control("start_update")
            await engine.control("update", info={**where, "transport": offer.transport, "timeout": self._context.weight_sync_timeout})
            await engine.control("finish_update", version=str(offer.version))
        if not await engine.control("reset_cache"):
            raise EngineError("vLLM could not drop the cache of the old weights")
        serving = number(await engine.control("version"))
        if serving != offer.version:
            raise EngineError(f"version {offer.version} of the weights was sent, and vLLM serves {serving}")

    async def _load_adapters(self, engine: Engine, folder: Path) -> None:
        """Every worker tells for which modules it has no place; with pipeline stages another worker may."""
        told = await engine.control("load_adapters", folder=str(folder))
        if left := set.intersection(*map(set, told)):
            raise EngineError(f"vLLM has no adapters for {listed(sorted(left))}. Fix: another lora_target, or lora_sync: merged")

    async def pause(self) -> None:
        """Stop sampling between two tokens; requests are kept."""
        self._paused = True
        await (await self._started()).control("pause")

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        if self._engine is not None:
            await self._engine.control("resume")

    async def abort(self, request: Request) -> None:
        """Cancel the request's `generate`, which drops it in the engine. A request that is not here is ignored."""
        if task := self._running.get(request):
            task.cancel()

    async def sleep(self) -> None:
        """Give the device memory back: the weights go to the host's memory, the cache is dropped. Raises EngineError where vLLM cannot.

        On a CPU there is no device memory, and nothing moves.
        """
        if self._context.devices and self._config.mode != "attach" and not self._config.enable_sleep_mode:
            raise EngineError("vLLM was started without sleep mode. Fix: strategy_config.enable_sleep_mode: true")
        if self._engine is not None:
            await self._engine.control("sleep")
        self._asleep = True

    async def wake(self) -> None:
        """Undo `sleep`."""
        if self._asleep and self._engine is not None:
            await self._engine.control("wake")
        self._asleep = False

    async def close(self) -> None:
        """End what was started; requests in progress fail with EngineError. May be called twice."""
        self._closed = True
        if self._starting is not None and self._engine is None:
            self._starting.cancel()
        for task in list(self._running.values()):
            task.cancel()
        engine, self._engine, self._starting = self._engine, None, None
        if engine is not None:
            await engine.close()
        if self._adapters is not None:
            await asyncio.to_thread(self._adapters.close)

    def _refuse(self) -> None:
        if self._closed:
            raise EngineError("the backend was closed")
        if self._broken:
            raise EngineError(self._broken)
        if self._asleep:
            raise EngineError("the backend sleeps. Fix: wake it before sampling")

    async def _started(self) -> Engine:
        """The engine, started by whoever comes first; all others wait for the same start."""
        if self._engine is not None:
            return self._engine
        if self._closed:
            raise EngineError("the backend is closed")
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Engine:
        engine: Engine = LocalEngine(self._config, self._context) if self._config.mode == "in_process" else ServedEngine(self._config, self._context)
        try:
            await engine.start()
            if self._adapters is not None:
                await engine.control("begin_adapters")
        except BaseException:
            await engine.close()
            raise
        self._engine = engine
        return engine

    async def _seen(self, ids: np.ndarray, request: Request) -> list[Picture]:
        """The request's images. Raises EngineError: a model of text alone, or ids that do not fit them; ConfigError: images not understood."""
        if not request.images:
            return []
        if self._pictures is None:
            if not sees(self._context.model):
                told = f"the request holds {len(request.images)} images, and the model takes text only"
                raise EngineError(f"{told}. Fix: a text rendering of the environment")
            self._pictures = Pictures(Path(str(self._context.model)))
        return await asyncio.to_thread(self._pictures.of, ids, request.images)
