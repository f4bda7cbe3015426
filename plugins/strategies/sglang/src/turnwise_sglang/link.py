"""The server that a backend talks to now: attached to, or started, and started again with the weights it had when it dies."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from attrs import define

from turnwise.contracts.inference import InferenceContext
from turnwise.errors import ConfigError, EngineError, EngineLost
from turnwise.ports import free_port
from turnwise_sglang import lora, memory, weights
from turnwise_sglang.api import Api, Gone
from turnwise_sglang.arguments import DTYPES, SPARE, device, environment, interpreter, server_arguments
from turnwise_sglang.config import SglangConfig
from turnwise_sglang.server import Server

GRACE = 10.0
"""Seconds in which a server that broke a connection is expected to end; one that lives on and answers is not replaced."""

ALIASES = {"half": "float16", "float": "float32"}
"""What SGLang also calls its dtypes."""


@define(eq=False)
class Link:
    """One server: how to call it, how many tensor parallel ranks it has, its process if it is ours. `lost`: it is of no use any more.

    `device`: cpu or cuda. `group`: the process group that its ranks share with the trainer. `bare`: it took the place of another and lacks that
    one's weights. `adapter`: the name of the adapter that requests have to give ("": none). `phase`: what it was last found dead in.
    """

    api: Api
    server: Server | None
    ranks: int = 1
    lost: bool = False
    device: str = "cpu"
    group: str = ""
    bare: bool = False
    adapter: str = ""
    phase: str = "sampling"


class Links:
    """Gives the link that works, and replaces one that does not, at most `restarts` times."""

    def __init__(self, config: SglangConfig, context: InferenceContext) -> None:
        self._config, self._context = config, context
        self._opening: asyncio.Task[Link] | None = None
        self._left = config.restarts
        self._failed: EngineError | None = None
        self._closed = False
        self.current: Link | None = None
        self.adapter: lora.Adapter | None = None
        self.kept = weights.Kept() if config.base_url is None and config.restarts else None

    async def get(self) -> Link:
        """A server that answers. Raises EngineError: it could not be started; EngineLost: it died too often, or none could take its place;
        ConfigError, MachineError."""
        if self._closed:
            raise EngineError("the backend was closed")
        if self._failed is not None:
            raise type(self._failed)(str(self._failed)) from self._failed
        if self.current is not None and not self.current.lost:
            return self.current
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._opened())
            self._opening.add_done_callback(_seen)
        # Shielded: many wait for one start, and one that gives up must not end it.
        return await asyncio.shield(self._opening)

    async def _opened(self) -> Link:
        try:
            if self.current is not None:
                try:
                    self.current = await self._replaced(self.current)
                except EngineError as error:
                    raise EngineLost(str(error)) from error
            else:
                self.current = await (self._attached(self._config.base_url) if self._config.base_url else self._started())
            return self.current
        except EngineError as error:
            if self._config.base_url is None:
                self._failed = error  # a server that cannot be started is not tried for every request
            raise
        finally:
            self._opening = None

    async def lost(self, link: Link, cause: Gone, phase: str = "sampling") -> None:
        """A call of `phase` broke off: wait whether the server is gone. Raises EngineError where it cannot be replaced."""
        if self._closed:
            raise EngineError("the backend was closed") from cause
        if link.server is None:
            raise EngineError(f"the SGLang server at {link.api.url} broke off ({cause}). Fix: see its log, and start it again") from cause
        deadline = time.monotonic() + GRACE
        while link.server.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        if link.server.alive and await link.api.healthy():
            return
        link.lost, link.phase = True, phase

    async def given_up(self, link: Link, cause: Gone, when: str) -> EngineError:
        """The error of a call that broke off and is not made again. Raises EngineLost where the server cannot be replaced."""
        await self.lost(link, cause, "the weight update")
        said = link.server.words() if link.server is not None else ""
        if link.lost and not self._left:
            await self.get()
        return EngineError(memory.told(f"SGLang died {when}: {cause}", said, "the weight update"))

    async def close(self) -> None:
        """Stop what was started, leave what was attached to; may be called twice."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        link, self.current = self.current, None
        if link is not None:
            if link.server is None:
                await lora.unload(link)
            await link.api.close()
            if link.server is not None:
                await asyncio.to_thread(link.server.stop, self._config.stop_timeout)
        if self.kept is not None:
            self.kept.close()

    async def _replaced(self, link: Link) -> Link:
        """Another server, with the weights that `link` had; one that dies before it has them counts as one more restart."""
        while link.lost:
            assert link.server is not None
            told = f"SGLang died ({link.server.how_it_ended()}), log {link.server.log}: {link.server.tail()}"
            said = link.server.words()
            await _stopped(link, keep_log=not self._left)  # whatever its death left of its group
            if not self._left:
                again = f"{told}. It was started again restarts = {self._config.restarts} times"
                reason = memory.told(again, said, link.phase)
                raise EngineError(f"{again}. Fix: see the log" if reason == again else reason)
            self._left -= 1
            link = await self._started()
            try:
                await self._given(link)
            except BaseException:
                await _stopped(link, keep_log=True)
                raise
        return link

    async def _given(self, link: Link) -> None:
        """Bring the last weights or adapter to a new server; it is `lost` if it died meanwhile."""
        try:
            if self.kept is not None and self.kept.folder is not None:
                await weights.from_folder(link.api, self.kept.folder, self.kept.version, self._context.weight_sync_timeout)
            if self.adapter is not None:
                await lora.load(link, self.adapter, self._context.weight_sync_timeout)
        except Gone as error:
            await self.lost(link, error, "the weight update")
            if not link.lost:
                raise EngineError(f"SGLang was started again, broke off its weights and lives on: {error}. Fix: see its log") from error
        link.bare = self.kept is not None and self.kept.elsewhere

    async def _started(self) -> Link:
        config, context = self._config, self._context
        port = free_port()
        server = Server(interpreter(config), server_arguments(config, context, port), environment(config, context), port)
        api = Api(server.url, config.control_timeout)
        try:
            await self._wait(server, api)
        except BaseException:
            await api.close()
            await asyncio.to_thread(server.stop, 0.0, True)
            raise
        return Link(api, server, config.tp_size, device="cpu" if device(config, context) == "cpu" else "cuda")

    async def _wait(self, server: Server, api: Api) -> None:
        deadline = time.monotonic() + self._config.start_timeout
        while not await api.healthy():
            if self._closed:
                raise EngineError("the backend was closed")
            if not server.alive:
                told = f"SGLang did not start ({server.how_it_ended()}), log {server.log}: {server.tail()}"
                raise EngineError(memory.told(told, server.words(), "the start"))
            if time.monotonic() > deadline:
                raise EngineError(
                    f"SGLang did not answer within start_timeout = {self._config.start_timeout:g} s, log {server.log}: {server.tail()}. "
                    "Fix: raise strategy_config.start_timeout"
                )
            await asyncio.sleep(0.2)

    async def _attached(self, url: str) -> Link:
        config = self._config
        api = Api(url, config.control_timeout, os.environ.get(config.api_key_env) if config.api_key_env else None)
        try:
            facts = await api.get("/server_info")
            facts["model_path"] = (await api.get("/model_info"))["model_path"]  # which an update from files has changed
            if problems := attach_problems(config, self._context, facts):
                raise ConfigError(problems)
            await api.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
        except Gone as error:
            await api.close()
            raise EngineError(f"no SGLang server answers at {url} ({error}). Fix: start it, or correct strategy_config.base_url") from error
        except BaseException:
            await api.close()
            raise
        return Link(api, None, int(facts.get("tp_size") or 1), device="cuda" if facts.get("device") == "cuda" else "cpu")


async def _stopped(link: Link, keep_log: bool) -> None:
    """End a server of ours at once."""
    await link.api.close()
    if link.server is not None:
        await asyncio.to_thread(link.server.stop, 0.0, keep_log)


def _seen(task: asyncio.Task[Link]) -> None:
    """Those who waited were told; where nobody waited any more, nothing is to be told."""
    if not task.cancelled():
        task.exception()


def attach_problems(config: SglangConfig, context: InferenceContext, facts: dict[str, Any]) -> list[str]:
    """What keeps an attached server (its /server_info, with the `model_path` of now) from doing what the options promise and the run needs."""
    problems = []
    where = f"the SGLang server at {config.base_url}"
    if context.needs_its_model and not context.is_model(str(facts["model_path"])):
        why = "only adapters will be sent" if context.lora is not None else "no weights will be sent"
        fix = f"Fix: start it with --model-path {Path(str(context.model)).resolve()}"
        problems.append(f"{where} has the model {facts['model_path']}, and {why}. {fix}")
    if ALIASES.get(facts["dtype"], facts["dtype"]) != DTYPES[context.dtype]:
        problems.append(f"{where} has the dtype {facts['dtype']}, the run {context.dtype}. Fix: start it with --dtype {DTYPES[context.dtype]}")
    if facts["max_req_input_len"] < context.sequence_length:
        fix = f"Fix: start it with --context-length {context.sequence_length + SPARE}, and a cache (--max-total-tokens) of no less"
        problems.append(f"{where} takes {facts['max_req_input_len']} tokens, and sequence_length is {context.sequence_length}. {fix}")
    if config.enable_deterministic_inference and not facts.get("enable_deterministic_inference"):
        problems.append(
            f"{where} runs without enable_deterministic_inference, so it ignores the seeds of requests. "
            "Fix: start it so, or strategy_config: {enable_deterministic_inference: false}"
        )
    if context.lora is not None and not facts.get("enable_lora"):
        fix = "Fix: start it with enable_lora, max_lora_rank and lora_target_modules, or actor_train.model_args.lora_sync: merged"
        problems.append(f"{where} runs without enable_lora, so it takes no adapters alone. {fix}")
    if int(facts.get("dp_size") or 1) != config.dp_size:
        problems.append(f"{where} has dp_size {facts.get('dp_size')}, the configuration {config.dp_size}. Fix: write the server's")
    return problems
