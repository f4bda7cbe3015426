"""Inference with transformers in this process: all waiting requests become one batch, sampled by one thread."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from attrs import define
from torch import nn

from turnwise.contracts.chat import Chat
from turnwise.contracts.inference import DeviceMemory, InferenceContext, Request, checked_ids
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import Generation
from turnwise.errors import ConfigError, EngineError, Problem, listed
from turnwise_hf import adapters
from turnwise_hf.chat import HfChat
from turnwise_hf.config import HfConfig
from turnwise_hf.decoding import Row, Sampled, sample_batch
from turnwise_hf.waiting import Waiting, cut, fail
from turnwise_hf.weights import ATTENTION, check_model, load_into, stream_into
from turnwise_hf.worker import Worker
from turnwise_torch.adapters import adapter_buckets
from turnwise_torch.broadcast import Member
from turnwise_torch.models import load_causal_lm
from turnwise_torch.shared import lookup
from turnwise_torch.stream import receive
from turnwise_torch.vision import Vision, has_vision


@define(eq=False)
class _Serving:
    """The model that samples, the lock under which it may be read, and its version. `own`: loaded by this backend, not
    the trainer's."""

    model: nn.Module
    lock: threading.Lock
    version: int
    own: bool


class HfBackend:
    """`turnwise.contracts.inference.InferenceBackend` with unmodified causal models.

    A batch starts when as many requests wait as episodes are live (`live`), in the order of `Request.order`,
    `infer_batch_size` rows at a time; if it is not known how many are live, after `batch_wait` seconds. Equal seeds,
    weights and ids give equal tokens in any batch, beyond rounding.
    """

    input: Literal["ids", "messages"] = "ids"

    def __init__(self, config: HfConfig, context: InferenceContext) -> None:
        """Raises ConfigError. The model is loaded by the first request, unless weights are received before."""
        if context.model is None:
            raise ConfigError(
                "actor_infer: the hf backend needs a model. Fix: name a folder, a hub id or a recipe as pretrain"
            )
        if context.attn_implementation not in ATTENTION:
            raise ConfigError(
                f"actor_infer.model_args.attn_implementation: {context.attn_implementation!r} is none of hf's:"
                f" {listed(ATTENTION)}. Fix: sdpa"
            )
        self._config, self._context, self._folder = config, context, context.model
        self._chat: Chat = context.chat or HfChat(context.model, context.trust_remote_code)
        self._vocabulary = _vocabulary(context.model)
        self._vision = Vision(context.model) if has_vision(context.model) else None
        self._device = torch.device(
            f"cuda:{context.devices[0]}" if context.devices and torch.cuda.is_available() else "cpu"
        )
        self._worker = Worker("hf-inference")
        self._waiting: list[Waiting] = []
        self._entries: dict[Request, Waiting] = {}
        self._live = 0
        self._timer: asyncio.TimerHandle | None = None
        # The worker thread's alone:
        self._serving: _Serving | None = None
        self._own: nn.Module | None = None
        self._adapter: dict[str, Any] | None = None
        self._member = Member(self._device)
        self._checked: nn.Module | None = None
        self._asleep = False
        self._half_written = False

    @staticmethod
    def transports(config: HfConfig, context: InferenceContext) -> tuple[str, ...]:
        """The trainer's own module at best, else tensors by any way."""
        return ("shared", "shared_memory", "process_group", "safetensors")

    def receivers(self, transport: str) -> int:
        """One reads."""
        return 1

    @staticmethod
    def check(config: HfConfig, context: InferenceContext) -> list[Problem]:
        """What can be known before anything is built."""
        if context.lora is None or importlib.util.find_spec("peft") is not None:
            return []
        text = (
            "adapters alone need the package peft in the hf backend. Fix: pip install 'turnwise-torch[lora]', or"
            " lora_sync: merged"
        )
        return [Problem("actor_train.model_args.lora_sync", text, machine=True)]

    async def generate(self, request: Request) -> Generation:
        """Sample one response. Raises EngineError: a prompt without room or with ids outside the vocabulary, a failed
        batch (with its cause)."""
        waiting = Waiting(request, self._row(request), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._entries[request] = waiting
        self._start_if_ready()
        try:
            sampled = await waiting.future
        finally:
            self._forget(waiting)
        text = cut(self._chat.decode(sampled.ids), request)
        finish: Any = sampled.finish
        return Generation(text, sampled.ids, sampled.logprobs, sampled.versions, finish)

    def live(self, episodes: int) -> None:
        """From now on a batch starts when `episodes` requests wait (0: after `batch_wait` seconds)."""
        self._live = episodes
        self._start_if_ready()

    async def receive(self, offer: Offer) -> int:
        """Serve the offered weights: `shared` (payload `key`, the trainer's own module), `shared_memory` or
        `process_group` (turnwise_torch.stream, .broadcast) or `safetensors` (payload `folder`). Raises EngineError.

        Between two tokens; a batch in progress goes on with the new weights and reads its sequences again. Returns the
        version.
        """
        if offer.transport not in (known := self.transports(self._config, self._context)):
            raise EngineError(f"the hf backend cannot receive weights by {offer.transport!r}. Known: {listed(known)}")
        if offer.transport != "shared" and (offer.adapter is None) != (self._context.lora is None):
            brings, wants = (
                ("adapters alone", "whole weights") if offer.adapter else ("whole weights", "adapters alone")
            )
            raise EngineError(
                f"the trainer offers {brings}, this backend was built for {wants}. Fix: one"
                " actor_train.model_args.lora_sync for both"
            )
        return await self._between(lambda: self._receive(offer))

    async def pause(self) -> None:
        """Stop sampling between two tokens; requests are kept. Returns when no token is in progress."""
        await asyncio.wrap_future(self._worker.pause())

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._worker.resume()

    async def abort(self, request: Request) -> None:
        """Cancel the request's `generate`; its row leaves a running batch at the next token. A request that is not here
        is ignored."""
        if waiting := self._entries.get(request):
            waiting.future.cancel()
            self._forget(waiting)

    async def sleep(self) -> None:
        """Move an own model to the CPU, between two tokens; the trainer's is the trainer's to move."""
        await self._between(lambda: self._move(True))

    async def wake(self, what: DeviceMemory) -> None:
        """Undo `sleep`: of a cache there is none between two batches."""
        if what == "weights":
            await self._between(lambda: self._move(False))

    async def close(self) -> None:
        """End the thread and forget the model; requests that wait fail with EngineError. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await asyncio.to_thread(self._worker.close)
        self._member.leave()
        for waiting in list(self._entries.values()):
            fail(waiting, EngineError("the backend was closed"))
        self._waiting.clear()
        self._serving = self._own = self._checked = None

    # On the event loop: requests become batches.

    def _row(self, request: Request) -> Row:
        longest = self._context.sequence_length
        ids = checked_ids(request, "hf", self._vocabulary, longest)
        if request.images and self._vision is None:
            where = f" (request of {request.tag})" if request.tag else ""
            raise EngineError(f"the model takes text only, and the request holds {len(request.images)} images{where}")
        args, limit = request.args, min(request.max_new_tokens, longest - len(ids))
        return Row(ids, limit, request.seed, args, self._stopper(args.stop_strings), request.images)

    def _stopper(self, strings: tuple[str, ...]) -> Callable[[np.ndarray], bool] | None:
        if not strings:
            return None
        # A character is at most four tokens of a byte-level tokenizer; the rest is for a character cut at the front.
        tail = 4 * max(map(len, strings)) + 4
        return lambda ids: any(
            string in text for text in [self._chat.decode(ids[-tail:], special=True)] for string in strings
        )

    def _start_if_ready(self) -> None:
        if not self._waiting or (self._live and len(self._waiting) < self._live):
            return
        if self._live:
            self._start()
        elif self._timer is None:
            self._timer = self._waiting[0].future.get_loop().call_later(self._config.batch_wait, self._start)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Not in the order of arrival, which timing decides: equal runs are to form equal batches.
        waiting = sorted(self._waiting, key=lambda item: (item.request.order, item.request.seed))
        self._waiting = []
        size = self._context.infer_batch_size or len(waiting)
        for begin in range(0, len(waiting), size):
            self._submit(waiting[begin : begin + size])

    def _submit(self, batch: list[Waiting]) -> None:
        aborted: set[int] = set()
        for index, waiting in enumerate(batch):
            # The index is bound as a default: a closure over the loop's variable would drop the last row.
            waiting.drop = lambda index=index: aborted.add(index)  # type: ignore[misc]
        try:
            done: Future[list[Sampled]] = self._worker.submit(
                lambda: self._sample([waiting.row for waiting in batch], aborted)
            )
        except EngineError as error:
            for waiting in batch:
                fail(waiting, error)
            return
        loop = batch[0].future.get_loop()

        def deliver() -> None:
            error = done.exception()
            for index, waiting in enumerate(batch):
                if error is not None:
                    fail(waiting, error)
                elif not waiting.future.done():
                    waiting.future.set_result(done.result()[index])

        # A loop that is closed has nobody waiting on it.
        done.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(deliver))

    def _forget(self, waiting: Waiting) -> None:
        self._entries.pop(waiting.request, None)
        if not waiting.future.done() or waiting.future.cancelled():
            waiting.drop()
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._start_if_ready()

    async def _between(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._worker.between(work))

    # On the worker's thread: the model.

    def _sample(self, rows: list[Row], aborted: set[int]) -> list[Sampled]:
        if self._asleep:
            raise EngineError("the backend sleeps. Fix: wake it before sampling")
        hold = _Hold(self)

        def gate() -> tuple[nn.Module, int]:
            self._worker.checkpoint(hold.let_go, hold.take)
            return hold.serving.model, hold.serving.version

        try:
            with torch.no_grad():
                hold.take()
                return sample_batch(rows, gate, self._chat.stop_ids, aborted, self._vision)
        except torch.OutOfMemoryError as error:
            longest = max(len(row.ids) + row.limit for row in rows)
            raise EngineError(
                f"out of memory while sampling {len(rows)} sequences of up to {longest} tokens. "
                "Fix: lower actor_infer.infer_batch_size or sequence_length"
            ) from error
        finally:
            hold.let_go()

    def _current(self) -> _Serving:
        """What serves, loaded at first use."""
        if self._half_written:
            raise EngineError(
                "the last weight update broke off, the backend's weights are half old and half new. Fix: resume from"
                " the checkpoint"
            )
        if self._serving is None:
            self._serving = _Serving(self._load(), threading.Lock(), 0, own=True)
        return self._serving

    def _load(self) -> nn.Module:
        if self._own is None:
            context = self._context
            model = load_causal_lm(self._folder, context.dtype, context.attn_implementation, context.trust_remote_code)
            self._own = model.to(self._device)
        return self._own

    def _receive(self, offer: Offer) -> int:
        if offer.transport == "shared":
            shared = lookup(offer.payload["key"])
            self._serving, self._own, self._adapter = (
                _Serving(shared.model, shared.lock, offer.version, own=False),
                None,
                None,
            )
        else:
            # Never into the trainer's module: an own one takes its place.
            model = self._load()
            if offer.adapter is not None:
                self._take_adapters(model, offer, offer.adapter)
            elif offer.transport == "safetensors":
                load_into(model, Path(offer.payload["folder"]))
            else:
                # Until the stream has ended: one that breaks off leaves a model that must not sample.
                self._half_written = True
                read = receive if offer.transport == "shared_memory" else self._member.receive
                # Closed early, the trainer stops sending.
                with contextlib.closing(read(offer.payload, self._context.weight_sync_timeout)) as buckets:
                    stream_into(model, buckets)
                self._half_written = False
            self._serving = _Serving(model, threading.Lock(), offer.version, own=True)
        return offer.version

    def _take_adapters(self, model: nn.Module, offer: Offer, config: Mapping[str, Any]) -> None:
        """Adapters are small: all are read before any is written, so that an update that breaks off leaves those of the
        last."""
        with contextlib.closing(adapter_buckets(offer, self._member, self._context.weight_sync_timeout)) as buckets:
            tensors = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
        if self._adapter is None:
            adapters.inject(model, config)
            self._adapter, self._checked = dict(config), None
        elif changed := adapters.different(self._adapter, config):
            raise EngineError(
                f"the trainer's adapters are not those of the first update ({'; '.join(changed)}). Fix: start the"
                " backend anew"
            )
        adapters.fill(model, tensors)

    def _move(self, asleep: bool) -> None:
        self._asleep = asleep
        if self._own is not None and self._device.type == "cuda":
            self._own.to("cpu" if asleep else self._device)
            if asleep:
                torch.cuda.empty_cache()

    def _check(self, model: nn.Module) -> None:
        if model is not self._checked:
            check_model(model)
            self._checked = model


class _Hold:
    """The right to read the serving model: its lock, and evaluation mode, both given back by `let_go`."""

    def __init__(self, backend: HfBackend) -> None:
        self._backend = backend
        self._training = self._held = False

    def take(self) -> None:
        self.serving = self._backend._current()
        # A shared module is the trainer's: its step takes the same lock, and never changes weights under a token.
        self.serving.lock.acquire()
        self._held = True
        self._training = self.serving.model.training
        if self._training:
            self.serving.model.eval()
        self._backend._check(self.serving.model)

    def let_go(self) -> None:
        if self._held:
            self._held = False
            if self._training:
                self.serving.model.train()
            self.serving.lock.release()


def _vocabulary(folder: Path) -> int:
    try:
        facts = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return int(facts.get("vocab_size") or facts["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder} is no language model's folder (config.json without vocab_size). Fix: name another pretrain"
        ) from error
