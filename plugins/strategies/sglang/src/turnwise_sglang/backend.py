"""Inference with SGLang over HTTP: requests in token ids, weights in update sessions, and a server that dies is
replaced."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from attrs import evolve

from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import DeviceMemory, InferenceContext, Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation, int32
from turnwise.errors import ConfigError, EngineError, Problem, listed, refuse
from turnwise_serving.affinity import Affinity
from turnwise_serving.answers import version_number
from turnwise_serving.endpoint import endpoint_problems
from turnwise_serving.http import Gone
from turnwise_serving.memory import UPDATE, WAKE
from turnwise_serving.models import sees, vocabulary
from turnwise_serving.offers import check_offer
from turnwise_serving.running import CLOSED, Running
from turnwise_sglang import images, lora, weights
from turnwise_sglang.answers import Limits, StopStrings, body, check_given_up, continued, ended, generation, joined
from turnwise_sglang.arguments import WHERE, argument_problems, device, machine_problem, memory_problems
from turnwise_sglang.config import AWAKE, SglangConfig
from turnwise_sglang.group import from_group
from turnwise_sglang.link import Link
from turnwise_sglang.links import Links
from turnwise_torch.broadcast import Member

TRIES = 4
"""How often one request is sent when the server breaks the connection and lives on."""
TAGS: Mapping[DeviceMemory, list[str]] = {"weights": ["weights"], "cache": ["kv_cache", "cuda_graph"]}
"""SGLang's names for what it gives back."""


class SglangBackend:
    """`turnwise.contracts.inference.InferenceBackend` with one SGLang server, started at the first call or attached to.

    Equal seeds, weights and ids give equal tokens, beyond rounding, with `enable_deterministic_inference`. Log-probs
    are SGLang's own, taken after the temperature and before top-k and top-p, so they are ours; None under speculative
    decoding. `links`: the server behind it now, and those that took the place of one that died.
    """

    input: Literal["ids", "messages"] = "ids"

    def __init__(self, config: SglangConfig, context: InferenceContext) -> None:
        """Starts nothing. Raises ConfigError: no model or chat, devices that are not one server's, a model that the
        server cannot serve so."""
        size = config.devices_per_engine
        if not context.updates and len(context.devices) % size == 0:
            # An evaluation builds one of the role's servers, in this process.
            context = evolve(context, devices=context.devices[:size])
        if context.model is None or context.chat is None:
            raise ConfigError(
                "actor_infer: the sglang backend needs a model. Fix: name a folder, a hub id or a recipe as pretrain"
            )
        if config.base_url is None and context.devices and len(context.devices) != size:
            raise ConfigError(
                f"actor_infer: one SGLang server of tp_size × pp_size × dp_size = {size} devices was given"
                f" {len(context.devices)}. Fix: dp_size, or a runtime that places several replicas (ray)"
            )
        # Before a run `check` has no folder to look into.
        refuse([*lora.problems(config, context), *images.problems(config, context), *weights.problems(context.model)])
        self._config, self._context, self._model = config, context, context.model
        self._chat: Chat = context.chat
        self._limits = Limits(context.sequence_length, vocabulary(context.model), sees(context.model))
        self._images = images.Images(context.model)
        self._ours = not config.engine_args.get("speculative_algorithm")
        self.links, self._homes = Links(config, context), Affinity()
        self._member = Member(torch.device("cpu"))
        # A response in progress names its adapter, and stages that share the layers sample on through a pause: it is
        # broken off, and goes on from its tokens as a new request.
        cut = config.pause_mode == "abort" or context.lora is not None or config.pp_size > 1
        self._mode = "abort" if cut else "retract"
        # Their count, also at the last one whose update failed half-way.
        self._pauses = self._torn = 0
        # The second one's clocks, the only limit of a response, stand still while the server is paused.
        late = f"SGLang did not answer within request_timeout = {config.request_timeout:g} s. Fix: raise it"
        self._running, self._sampling = Running(), Running(config.request_timeout, late)
        self._aborts: set[asyncio.Task[None]] = set()
        # Set while requests may be sent; cleared by a pause, and by an update.
        self._awake = asyncio.Event()
        self._awake.set()
        self._version: int | None = None
        self._broken = ""
        self._asleep: set[DeviceMemory] = set()
        self._slept: Link | None = None
        self._closed = False

    @staticmethod
    def transports(config: SglangConfig, context: InferenceContext) -> tuple[str, ...]:
        """What the server's sizes leave; adapters end in this process, whatever they are."""
        if context.lora is None and config.dp_size > 1:
            # SGLang updates from tensors in one copy only.
            return ("safetensors",)
        if context.lora is None and config.pp_size > 1:
            # SGLang numbers the ranks of a group by tensor parallel rank alone.
            return ("shared_memory", "safetensors")
        if context.lora is None and device(config, context) != "cpu":
            # From GPU to GPU, past the hosts' memory.
            return ("process_group", "shared_memory", "safetensors")
        return ("shared_memory", "process_group", "safetensors")

    def receivers(self, transport: str) -> int:
        """One reads, for all ranks of the server."""
        return 1

    @staticmethod
    def check(config: SglangConfig, context: InferenceContext) -> list[Problem]:
        """The interpreter and its SGLang, and `engine_args` by SGLang's own argument class; for an attached server its
        address."""
        if config.base_url is None:
            lack = machine_problem(config)
            own = [lack] if lack else [*memory_problems(config, context), *argument_problems(config, context)]
            return [*lora.problems(config, context), *own]
        problems = [*lora.problems(config, context), *images.problems(config, context)]
        if config.engine_args:
            text = (
                f"{listed(config.engine_args)} cannot be given to a server that is attached to (base_url). Fix: remove"
                " them"
            )
            problems.append(Problem(WHERE, text))
        return [*problems, *endpoint_problems(WHERE, config.base_url, config.api_key_env)]

    async def generate(self, request: Request) -> Generation:
        """Sample one response; sent again, with its seed, to a server that takes the place of a dead one. Raises
        EngineError."""
        if self._asleep:
            raise EngineError("the backend sleeps. Fix: wake it before sampling")
        payload = body(request, self._limits, self._chat.stop_ids)
        with self._homes.of(request, range(self._config.dp_size)) as copy:
            if self._config.dp_size > 1:
                payload["routed_dp_rank"] = copy
            return await self._running.of(request, self._answer(request, payload))

    def live(self, episodes: int) -> None:
        """SGLang batches what is there at every token; it needs no count."""

    async def receive(self, offer: Offer) -> int:
        """Serve the offered weights: `shared_memory` (turnwise_torch.stream), `process_group`
        (turnwise_torch.broadcast) or `safetensors` (payload `folder`). Raises EngineError.

        Between two tokens: responses in progress go on, their ids computed again with the new weights. With
        `context.lora` an offer brings adapters alone. Returns the version that the server reports.
        """
        check_offer(offer, "SGLang", self.transports(self._config, self._context), self._context.lora)
        paused = not self._awake.is_set()
        self._awake.clear()
        try:
            link = await self._paused()
            # Before anything is sent: however the update ends from here on, the server may hold a mixture.
            self._broken = f"the weight update to version {offer.version} failed half-way"
            link = await self._update(link, offer)
            # Cached prompts were computed with the old weights.
            await link.api.call("/flush_cache")
            version = version_number((await link.api.get("/model_info"))["weight_version"])
            self._version, self._broken, link.bare = version, "", False
        except Gone as error:
            raise await self.links.given_up(link, error, f"in the weight update to version {offer.version}") from error
        finally:
            if not paused and not self._closed:
                await self.resume()
        return version

    async def pause(self) -> None:
        """Stop sampling; requests are kept, by the server or here. A server that is not up, or that died since, is
        started: it takes longer than an offer of weights may wait. Raises EngineError."""
        self._awake.clear()
        await self._paused()

    async def resume(self) -> None:
        """Go on after `pause`."""
        if (link := self.links.current) is not None and not link.lost:
            # Its requests will find out, and replace it.
            with contextlib.suppress(Gone):
                if self._broken:
                    # What the server kept would go on with a mixture of weights, and what it holds back will begin so.
                    self._torn = self._pauses
                    await link.api.call("/abort_request", {"abort_all": True})
                await link.api.post("/continue_generation", {"torch_empty_cache": False})
        self._sampling.resume()
        self._awake.set()

    async def abort(self, request: Request) -> None:
        """Cancel the request's `generate`, here and in the server. A request that is not here is ignored."""
        self._running.abort(request)

    async def sleep(self) -> None:
        """Give the device memory back, with `enable_memory_saver`; a server that died holds none. Raises EngineError on
        a device without it."""
        if not self._config.sleeps(self._context) and self._context.devices:
            raise EngineError(AWAKE)
        self._asleep = {"weights", "cache"}
        # Another server in its place has never slept, and must not be woken.
        self._slept = self.links.current
        await self._memory("/flush_cache", "/release_memory_occupation")

    async def wake(self, what: DeviceMemory) -> None:
        """Undo `sleep` for one part; in place of a server that died meanwhile the next call starts another."""
        if what in self._asleep and self._slept is self.links.current:
            await self._memory("/resume_memory_occupation", tags=TAGS[what])
        self._asleep -= {what}

    async def close(self) -> None:
        """Stop a server of ours, leave one that was attached to; requests that wait fail with EngineError. May be
        called twice."""
        self._closed = True
        self._awake.set()
        await self._running.close()
        # An attached server lets our adapter go only when no request uses it any more.
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self.links.close()
        await asyncio.to_thread(self._member.leave)

    async def _answer(self, request: Request, payload: dict[str, Any]) -> Generation:
        if request.images:
            assert request.ids is not None
            payload |= await asyncio.to_thread(self._images.fields, int32(request.ids), request.images)
        # `before`: what was sampled until a pause broke the response off, to go on from there.
        broken, before = 0, None
        while broken < TRIES + self._config.restarts:
            await self._awake.wait()
            link = await self._serving()
            # Paused while a server was started.
            if not self._awake.is_set():
                continue
            # A new one each time: the server may remember the old one.
            rid, pauses = uuid.uuid4().hex, self._pauses
            name = {"lora_path": link.adapter} if link.adapter else {}
            try:
                sent = {**continued(payload, before), **name, "rid": rid}
                answer, length = await self._sampling.of(request, self._sampled(link, sent, request, before))
            except Gone as error:
                broken += 1
                await self.links.lost(link, error)
                continue
            except asyncio.CancelledError:
                self._abort_later(link, rid)
                raise
            except EngineError:
                if name.get("lora_path", "") == link.adapter:
                    raise
                # It came too late for the adapter that it named.
                continue
            if pauses < self._torn:
                continue
            whole = joined(before, answer)
            if answer["meta_info"]["finish_reason"]["type"] == "abort" and length is None:
                # A closed backend says so when it looks for the server again.
                check_given_up(answer, self._closed or pauses < self._pauses)
                before = whole
                if not (finish := ended(whole, payload)):
                    continue
                whole["meta_info"]["finish_reason"] = {"type": finish}
            return generation(whole, request, self._chat, self._ours, length)
        raise EngineError("SGLang broke off the same request again and again. Fix: see its log")

    async def _serving(self) -> Link:
        """The server, with weights that may be sampled from."""
        if self._closed:
            raise EngineError(CLOSED)
        if self._broken:
            raise EngineError(f"{self._broken}, so nothing may be sampled from it. Fix: send the weights again")
        if self._config.load_format == "dummy" and self._version is None:
            raise EngineError(
                "load_format: dummy holds random weights until the trainer's arrive. Fix: load_format: auto to play"
                " without a trainer"
            )
        link = await self.links.get()
        if link.bare:
            raise EngineError(
                "SGLang died and was started again; its weights had come by process_group, which keeps no copy. Fix:"
                " send them again"
            )
        return link

    async def _sampled(
        self, link: Link, payload: dict[str, Any], request: Request, before: dict[str, Any] | None
    ) -> tuple[dict[str, Any], int | None]:
        """The server's last answer, and how many ids of it and of the part `before` a stop string leaves (None: it did
        not end the response)."""
        if not payload["stream"]:
            return await link.api.post("/generate", payload, math.inf), None
        stops, length, answer = StopStrings(request, self._chat), None, None
        already = before["output_ids"] if before else []
        async for answer in link.api.stream("/generate", payload, math.inf):
            if length is None and (length := stops.length([*already, *answer["output_ids"]])) is not None:
                # The stream is read to its end: only the last answer says which weights sampled each token.
                await link.api.call("/abort_request", {"rid": payload["rid"]})
        if answer is None or not answer["meta_info"]["finish_reason"]:
            raise Gone("the stream ended early")
        return answer, length

    def _abort_later(self, link: Link, rid: str) -> None:
        async def send() -> None:
            # A server that is gone samples nothing.
            with contextlib.suppress(Gone, EngineError):
                await link.api.call("/abort_request", {"rid": rid})

        # A server of ours ends with the backend.
        if not self._closed or link.server is None:
            task = asyncio.ensure_future(send())
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _paused(self) -> Link:
        """The server, in which nothing is sampled now; one that turns out to be dead is replaced first. Raises
        EngineError."""
        self._pauses += 1
        self._sampling.pause()
        for _ in range(TRIES + self._config.restarts):
            link = await self.links.get()
            try:
                await link.api.post("/pause_generation", {"mode": self._mode})
            except Gone as error:
                await self.links.lost(link, error)
            else:
                return link
        raise EngineError("SGLang broke off a pause again and again. Fix: see its log")

    async def _memory(self, *paths: str, **body: Any) -> None:
        """Calls about the device memory, with `enable_memory_saver`; a server that is not up, or turns out to be dead,
        has none to give or take."""
        link = self.links.current
        if not self._config.sleeps(self._context) or link is None or link.lost:
            return
        try:
            for path in paths:
                await link.api.call(path, body)
        except Gone as error:
            await self.links.lost(link, error, WAKE)
            if not link.lost:
                raise EngineError(f"SGLang broke off {path} and lives on: {error}. Fix: see its log") from error

    async def _update(self, link: Link, offer: Offer) -> Link:
        """Bring the weights to the server and, where one may have to be replaced, into the copy that it would start
        from."""
        kept, timeout = self.links.kept, self._context.weight_sync_timeout
        if offer.adapter is not None:
            return await self._adapted(link, offer)
        if offer.transport == "process_group":
            return await self._grouped(link, offer)
        if kept is not None:
            kept.begin()
        if offer.transport == "safetensors":
            folder = Path(offer.payload["folder"])
            weights.check_folder(self._model, folder)
            if kept is not None:
                # Kept before they are loaded: where loading them kills the server, the next one starts from this copy.
                kept.add_folder(folder)
                kept.commit(offer.version)
            try:
                await weights.from_folder(link.api, folder, offer.version, timeout)
            except Gone as error:
                return await self._replaced(link, error)
            return link
        names, dtype = weights.Names(weights.shapes(self._model)), weights.DTYPES[self._context.dtype]
        alive = await weights.from_stream(link.api, offer, names, dtype, link.ranks, kept, timeout)
        if kept is not None:
            kept.commit(offer.version)
        return link if alive else await self._replaced(link, Gone("in a weight update"))

    async def _adapted(self, link: Link, offer: Offer) -> Link:
        """Read an adapter here, and bring it to the server in place of the last one."""
        timeout, dtype = self._context.weight_sync_timeout, weights.DTYPES[self._context.dtype]
        adapter = await asyncio.to_thread(lora.read, offer, self._member, dtype, timeout, weights.shapes(self._model))
        try:
            await lora.load(link, adapter, timeout)
        except Gone as error:
            self.links.adapter = adapter
            return await self._replaced(link, error)
        self.links.adapter = adapter
        return link

    async def _grouped(self, link: Link, offer: Offer) -> Link:
        """Bring the weights to the server past this process; no copy of them is kept."""
        if self.links.kept is not None:
            self.links.kept.passed_by()
        await from_group(link, offer, weights.Names(weights.shapes(self._model)), self._context.weight_sync_timeout)
        return link

    async def _replaced(self, link: Link, cause: Gone) -> Link:
        """The server that took the place of `link`, with the weights that were kept last, paused."""
        await self.links.lost(link, cause, UPDATE)
        if not link.lost:
            raise EngineError(f"SGLang broke off a weight update and lives on: {cause}. Fix: see its log") from cause
        return await self._paused()
