"""The server that a backend talks to now: attached to, or started, and started again with the weights it had when it
dies."""

from __future__ import annotations

import asyncio
import time

from turnwise.contracts.inference import InferenceContext
from turnwise.errors import ConfigError, EngineError, EngineLost
from turnwise.ports import free_port
from turnwise_serving.endpoint import key_from
from turnwise_serving.health import until_healthy
from turnwise_serving.http import Gone
from turnwise_serving.memory import UPDATE
from turnwise_serving.running import CLOSED
from turnwise_sglang import lora, weights
from turnwise_sglang.api import Api
from turnwise_sglang.arguments import device, environment, interpreter, server_arguments
from turnwise_sglang.attached import attach_problems
from turnwise_sglang.config import SglangConfig
from turnwise_sglang.link import Link
from turnwise_sglang.memory import MEMORY
from turnwise_sglang.server import Server

GRACE = 10.0
"""Seconds in which a server that broke a connection is expected to end; one that lives on and answers is not replaced."""


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
        # Only a server of ours can be started again, and needs the copy then.
        self.kept = weights.Kept() if config.base_url is None and config.restarts else None

    async def get(self) -> Link:
        """A server that answers. Raises EngineError: it could not be started; EngineLost: it died too often, or none
        could take its place; ConfigError, MachineError."""
        if self._closed:
            raise EngineError(CLOSED)
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
                self.current = await (
                    self._attached(self._config.base_url) if self._config.base_url else self._started()
                )
            return self.current
        except EngineError as error:
            if self._config.base_url is None:
                # A server that cannot be started is not tried for every request.
                self._failed = error
            raise
        finally:
            self._opening = None

    async def lost(self, link: Link, cause: Gone, phase: str = "sampling") -> None:
        """A call of `phase` broke off: wait whether the server is gone. Raises EngineError where it cannot be
        replaced."""
        if self._closed:
            raise EngineError(CLOSED) from cause
        if link.server is None:
            raise EngineError(
                f"the SGLang server at {link.api.url} broke off ({cause}). Fix: see its log, and start it again"
            ) from cause
        deadline = time.monotonic() + GRACE
        while link.server.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        # Alive and well: one connection broke, and replacing it would lose its cache and its weights for nothing.
        if link.server.alive and await link.api.healthy():
            return
        link.lost, link.phase = True, phase

    async def given_up(self, link: Link, cause: Gone, when: str) -> EngineError:
        """The error of a call that broke off and is not made again. Raises EngineLost where the server cannot be
        replaced."""
        await self.lost(link, cause, UPDATE)
        said = link.server.words() if link.server is not None else ""
        # Asked for here, for the error of `get` says that nothing can take its place.
        if link.lost and not self._left:
            await self.get()
        return EngineError(MEMORY.explained(f"SGLang died {when}: {cause}", said, UPDATE))

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
        """Another server, with the weights that `link` had; one that dies before it has them counts as one more
        restart."""
        while link.lost:
            assert link.server is not None
            death = f"SGLang died ({link.server.how_it_ended()}), log {link.server.log}: {link.server.tail()}"
            said = link.server.words()
            # Ends whatever its death left of its group; the log stays where the error below names it.
            await _stopped(link, keep_log=not self._left)
            if not self._left:
                again = f"{death}. It was started again restarts = {self._config.restarts} times"
                reason = MEMORY.explained(again, said, link.phase)
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
                await weights.from_folder(
                    link.api, self.kept.folder, self.kept.version, self._context.weight_sync_timeout
                )
            if self.adapter is not None:
                await lora.load(link, self.adapter, self._context.weight_sync_timeout)
        except Gone as error:
            await self.lost(link, error, UPDATE)
            if not link.lost:
                raise EngineError(
                    f"SGLang was started again, broke off its weights and lives on: {error}. Fix: see its log"
                ) from error
        link.bare = self.kept is not None and self.kept.elsewhere

    async def _started(self) -> Link:
        config, context = self._config, self._context
        port = free_port()
        server = Server(
            interpreter(config), server_arguments(config, context, port), environment(config, context), port
        )
        api = Api(server.url, config.control_timeout, server.key)
        try:
            await until_healthy(server, api, config.start_timeout, lambda: self._closed)
        except BaseException:
            await api.close()
            # The log stays: the error names it.
            await asyncio.to_thread(server.stop, 0.0, True)
            raise
        return Link(api, server, config.tp_size, device="cpu" if device(config, context) == "cpu" else "cuda")

    async def _attached(self, url: str) -> Link:
        config = self._config
        api = Api(url, config.control_timeout, key_from(config.api_key_env))
        try:
            facts = await api.get("/server_info")
            # /server_info has the folder of its start, which an update from files has changed.
            facts["model_path"] = (await api.get("/model_info"))["model_path"]
            if problems := attach_problems(config, self._context, facts):
                raise ConfigError(problems)
            # Whatever an earlier run called its last weights, for this run they are those of before its first update.
            await api.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
        except Gone as error:
            await api.close()
            raise EngineError(
                f"no SGLang server answers at {url} ({error}). Fix: start it, or correct strategy_config.base_url"
            ) from error
        except BaseException:
            await api.close()
            raise
        return Link(
            api, None, int(facts.get("tp_size") or 1), device="cuda" if facts.get("device") == "cuda" else "cpu"
        )


async def _stopped(link: Link, keep_log: bool) -> None:
    """End a server of ours at once."""
    await link.api.close()
    if link.server is not None:
        await asyncio.to_thread(link.server.stop, 0.0, keep_log)


def _seen(task: asyncio.Task[Link]) -> None:
    """Those who waited have the error; where nobody waited any more, asyncio shall not report it as forgotten."""
    if not task.cancelled():
        task.exception()
