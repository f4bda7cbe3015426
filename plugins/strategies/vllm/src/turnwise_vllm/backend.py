"""Inference with vLLM: requests in token ids to an engine in this process or to a server, weights taken in place
between two tokens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import DeviceMemory, InferenceContext, Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation
from turnwise.errors import ConfigError, EngineError, Problem, listed, refuse
from turnwise_serving.affinity import Affinity
from turnwise_serving.answers import version_number
from turnwise_serving.models import sees, vocabulary
from turnwise_serving.offers import check_offer
from turnwise_serving.running import CLOSED, Running
from turnwise_vllm.adapters import Folder
from turnwise_vllm.arguments import cpu_build, problems, replicas
from turnwise_vllm.config import VllmConfig
from turnwise_vllm.engine import Engine, LocalEngine
from turnwise_vllm.images import Picture, Pictures
from turnwise_vllm.requests import generation, prompt_ids, sampling
from turnwise_vllm.server import ServedEngine

TAGS: Mapping[DeviceMemory, str] = {"weights": "weights", "cache": "kv_cache"}
"""vLLM's names for what it lets sleep and wakes."""


class VllmBackend:
    """`turnwise.contracts.inference.InferenceBackend` with vLLM.

    The engine starts at the first use. Equal seeds, weights and ids give equal tokens in any batch, beyond rounding.
    Tokens sampled before an update keep their version; those after it are sampled from a cache that was computed again
    with the new weights. `engine`: None before it has started, and after `close`.
    """

    input: Literal["ids", "messages"] = "ids"

    def __init__(self, config: VllmConfig, context: InferenceContext) -> None:
        """Raises ConfigError or MachineError; nothing is started."""
        if context.model is None or context.chat is None:
            raise ConfigError(
                "actor_infer: the vllm backend needs a model and its chat. Fix: name a folder, a hub id or a recipe as"
                " pretrain"
            )
        refuse(problems(config, context))
        self._config, self._context = config, context
        self._chat: Chat = context.chat
        self._vocabulary = vocabulary(context.model)
        self._pictures: Pictures | None = None
        self._longest = min(config.max_model_len or context.sequence_length, context.sequence_length)
        self._adapters = Folder() if context.lora is not None else None
        self._copies, self._homes = replicas(config, context), Affinity()
        self.engine: Engine | None = None
        self._starting: asyncio.Task[Engine] | None = None
        seconds = config.request_timeout
        self._running = Running(seconds, f"vLLM did not answer within request_timeout = {seconds:g} s. Fix: raise it")
        self._names = itertools.count()
        self._asleep: set[DeviceMemory] = set()
        self._paused = self._closed = False
        self._empty = config.load_format == "dummy"
        self._broken = ""

    @staticmethod
    def transports(config: VllmConfig, context: InferenceContext) -> tuple[str, ...]:
        """On GPUs at best from one to the other, past the hosts' memory."""
        through_memory, direct = "shared_memory", "process_group"
        first = (direct, through_memory) if context.devices and not cpu_build() else (through_memory, direct)
        return (*first, "safetensors")

    def receivers(self, transport: str) -> int:
        """Each worker reads weights for itself; adapters are read here, for all of them."""
        return self._config.devices_per_engine * self._copies if self._context.lora is None else 1

    @staticmethod
    def check(config: VllmConfig, context: InferenceContext) -> list[Problem]:
        """What is wrong with the options, or missing here; vLLM's argument names are read from its source."""
        return problems(config, context)

    async def generate(self, request: Request) -> Generation:
        """Sample one response. Raises EngineError: a prompt without room or with ids outside the vocabulary, an engine
        that is gone, or that took more than `request_timeout`, pauses left out."""
        ids = prompt_ids(request, self._vocabulary, self._longest)
        pictures = await self._seen(ids, request)
        self._refuse()
        if self._empty:
            raise EngineError(
                "load_format is dummy and no weights have come yet. Fix: load_format: auto, or a weight update before"
                " the first request"
            )
        engine = await self._started()
        fields = sampling(request, self._longest - len(ids), self._chat.stop_ids)
        # Prefix caches are a copy's own: a trajectory stays with the copy that has read its beginning.
        with self._homes.of(request, range(self._copies)) as copy:
            name = f"turnwise-{id(self)}-{next(self._names)}"
            work = engine.generate(ids.tolist(), fields, name, pictures, copy if self._copies > 1 else None)
            answer = await self._running.of(request, work)
        return generation(answer, request, self._chat, self._config.logprobs_mode)

    def live(self, episodes: int) -> None:
        """Nothing to do: vLLM batches what is there at every token."""

    async def receive(self, offer: Offer) -> int:
        """Take the offered weights in place: `shared_memory` or `process_group` (payload of turnwise_torch.stream or
        .broadcast), or `safetensors` (payload `folder`).

        Between two tokens; the cache of the old weights is dropped, and sequences in progress are read again. Raises
        EngineError; after a failed update the engine holds a mixture, so requests fail until a whole one has come.
        """
        check_offer(offer, "vLLM", self.transports(self._config, self._context), self._context.lora)
        if "weights" in self._asleep:
            raise EngineError("the backend sleeps. Fix: wake it before a weight update")
        engine = await self._started()
        if not self._paused:
            await engine.control("pause")
        self._running.pause()
        try:
            await self._update(engine, offer)
        except BaseException:
            # A cancelled update leaves a mixture as a failed one does, so BaseException.
            held = "a mixture of weights" if self._adapters is None else "nobody knows which adapters"
            self._broken = (
                f"the last weight update failed, so the engine holds {held}. Fix: a whole update, or another start"
            )
            self._running.break_off(self._broken)
            raise
        finally:
            if not self._paused:
                # A pause that was asked for outlasts the update.
                self._running.resume()
                await engine.control("resume")
        self._empty, self._broken = False, ""
        return offer.version

    async def _update(self, engine: Engine, offer: Offer) -> None:
        if self._adapters is not None:
            folder = await asyncio.to_thread(self._adapters.write, offer, self._context.weight_sync_timeout)
            await self._load_adapters(engine, folder)
            await engine.control("set_version", new_version=str(offer.version))
        else:
            where = (
                {"folder": str(offer.payload["folder"])}
                if offer.transport == "safetensors"
                else {"payload": dict(offer.payload)}
            )
            # Three steps, as vLLM's interface has it: begun in every worker, read by every worker, put into place.
            await engine.control("start_update")
            await engine.control(
                "update", info={**where, "transport": offer.transport, "timeout": self._context.weight_sync_timeout}
            )
            await engine.control("finish_update", version=str(offer.version))
        # Last of all: the caches of prompts and of responses in progress were computed with the old weights.
        if not await engine.control("reset_cache"):
            raise EngineError("vLLM could not drop the cache of the old weights")
        # Asked, not assumed: the version stands beside every token that is sampled from here on.
        serving = version_number(await engine.control("version"))
        if serving != offer.version:
            raise EngineError(f"version {offer.version} of the weights was sent, and vLLM serves {serving}")

    async def _load_adapters(self, engine: Engine, folder: Path) -> None:
        """Every worker reports for which modules it has no place; with pipeline stages another worker may."""
        unplaced = await engine.control("load_adapters", folder=str(folder))
        if left := set.intersection(*map(set, unplaced)):
            raise EngineError(
                f"vLLM has no adapters for {listed(sorted(left))}. Fix: another lora_target, or lora_sync: merged"
            )

    async def pause(self) -> None:
        """Stop sampling between two tokens; requests are kept."""
        self._paused = True
        await (await self._started()).control("pause")
        self._running.pause()

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        self._running.resume()
        if self.engine is not None:
            await self.engine.control("resume")

    async def abort(self, request: Request) -> None:
        """Cancel the request's `generate`, which drops it in the engine. A request that is not here is ignored."""
        self._running.abort(request)

    async def sleep(self) -> None:
        """Give the device memory back: the weights go to the host's memory, the cache is dropped. Raises EngineError
        where vLLM cannot.

        On a CPU there is no device memory, and nothing moves.
        """
        if self._context.devices and self._config.mode != "attach" and not self._config.sleeps(self._context):
            raise EngineError("vLLM was started without sleep mode. Fix: strategy_config.enable_sleep_mode: true")
        if self.engine is not None:
            await self.engine.control("sleep")
        self._asleep = {"weights", "cache"}

    async def wake(self, what: DeviceMemory) -> None:
        """Undo `sleep` for one part. vLLM goes on scheduling when both are back."""
        if what in self._asleep and self.engine is not None:
            await self.engine.control("wake", tag=TAGS[what])
        self._asleep -= {what}

    async def close(self) -> None:
        """End what was started; requests in progress fail with EngineError. May be called twice."""
        self._closed = True
        # A start that is not awaited any more would leave its processes behind.
        if self._starting is not None and self.engine is None:
            self._starting.cancel()
        self._running.break_off(CLOSED)
        # Taken out first, so that a second call finds nothing to end.
        engine, self.engine, self._starting = self.engine, None, None
        if engine is not None:
            await engine.close()
        if self._adapters is not None:
            await asyncio.to_thread(self._adapters.close)

    def _refuse(self) -> None:
        if self._closed:
            raise EngineError(CLOSED)
        if self._broken:
            raise EngineError(self._broken)
        if self._asleep:
            raise EngineError("the backend sleeps. Fix: wake it before sampling")

    async def _started(self) -> Engine:
        """The engine, started by whoever comes first; all others wait for the same start."""
        if self.engine is not None:
            return self.engine
        if self._closed:
            raise EngineError(CLOSED)
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        # Shielded: many wait for one start, and one that gives up must not end it.
        return await asyncio.shield(self._starting)

    async def _start(self) -> Engine:
        engine: Engine = (
            LocalEngine(self._config, self._context)
            if self._config.mode == "in_process"
            else ServedEngine(self._config, self._context)
        )
        try:
            await engine.start()
            if self._adapters is not None:
                await engine.control("begin_adapters")
        except BaseException:
            await engine.close()
            raise
        # Not before: no request shall meet an engine that has no place for its adapters yet.
        self.engine = engine
        return engine

    async def _seen(self, ids: np.ndarray, request: Request) -> list[Picture]:
        """The request's images. Raises EngineError: a model of text alone, or ids that do not fit them; ConfigError:
        images not understood."""
        if not request.images:
            return []
        if self._pictures is None:
            if not sees(self._context.model):
                lack = f"the request holds {len(request.images)} images, and the model takes text only"
                raise EngineError(f"{lack}. Fix: a text rendering of the environment")
            self._pictures = Pictures(Path(str(self._context.model)))
        return await asyncio.to_thread(self._pictures.of, ids, request.images)
