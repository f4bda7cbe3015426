"""A backend of SGLang whose servers are stand-ins: the HTTP interface and the process in one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.contracts.train import Lora, Offer
from turnwise.data.trajectory import int32
from turnwise.errors import EngineError
from turnwise.testing.fake_model import FakeChat
from turnwise_serving.http import Gone
from turnwise_sglang.backend import SglangBackend
from turnwise_sglang.config import SglangConfig
from turnwise_sglang.link import Link
from turnwise_sglang.links import Links

PAUSE, DISK, RELEASE, RESUME = (
    "/pause_generation",
    "/update_weights_from_disk",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)


class Fake:
    """A server and its interface in one. `dies`: the calls that kill it; `breaks`: those that break off though it lives
    on; `refuses`: those that it answers with an error."""

    log = Path("server.log")
    url = "http://h:1"

    def __init__(self, dies: tuple[str, ...] = (), refuses: tuple[str, ...] = (), breaks: tuple[str, ...] = ()) -> None:
        self.dies, self.refuses, self.breaks = dies, refuses, breaks
        self.alive, self.stopped, self.calls = True, False, list[str]()
        self.said = ""
        self.aborted = asyncio.Event()

    async def post(self, path: str, body: Any = None, timeout: float | None = None) -> dict[str, Any]:
        self.calls.append(path)
        self.alive = self.alive and path not in self.dies
        if not self.alive or path in self.breaks:
            raise Gone(path)
        if path in self.refuses:
            raise EngineError(f"refused {path}")
        if path == "/generate" or (path == "/unload_lora_adapter" and "/generate" in self.calls):
            await self.aborted.wait()
        elif path == "/abort_request":
            self.aborted.set()
        return {"weight_version": "7"}

    async def call(self, path: str, body: Any = None) -> str:
        await self.post(path)
        return ""

    async def get(self, path: str) -> dict[str, Any]:
        return await self.post(path)

    async def healthy(self) -> bool:
        return self.alive

    async def close(self) -> None:
        pass

    def tail(self) -> str:
        return "the end of its log"

    def words(self) -> str:
        return self.said

    def how_it_ended(self) -> str:
        return "signal SIGKILL"

    def stop(self, patience: float, keep_log: bool = False) -> None:
        self.alive, self.stopped = False, True


def folder(place: Path, facts: str = '{"vocab_size": 32}') -> Path:
    (place / "config.json").write_text(facts, encoding="utf-8")
    return place


class Waiting(Links):
    """Links to `waiting`, one after the other; the first one is up."""

    def __init__(self, config: SglangConfig, context: InferenceContext, waiting: list[Link]) -> None:
        super().__init__(config, context)
        self.waiting = waiting
        if waiting:
            self.current = waiting.pop(0)

    async def _started(self) -> Link:
        if not self.waiting:
            raise EngineError("SGLang did not start")
        return self.waiting.pop(0)


class Updated(SglangBackend):
    """Takes every offer without its tensors."""

    async def _update(self, link: Link, offer: Offer) -> Link:
        return link


def built(
    place: Path,
    *servers: Fake,
    lora: Lora | None = None,
    kind: type[SglangBackend] = SglangBackend,
    **options: Any,
) -> SglangBackend:
    """A backend whose servers are `servers`, one after the other; the first one is up."""
    config, context = SglangConfig(**options), InferenceContext(folder(place), FakeChat(end=2), lora=lora)
    backend = kind(config, context)
    waiting = [Link(cast(Any, server), None if "base_url" in options else cast(Any, server)) for server in servers]
    backend.links = Waiting(config, context, waiting)
    return backend


def played(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))


def ask() -> Request:
    return Request(0, GeneratingArgs(), 4, ids=int32([3]))
