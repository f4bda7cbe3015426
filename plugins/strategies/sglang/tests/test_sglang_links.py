"""Servers that die at every moment, and what a backend does about it: the HTTP interface and the process are
stand-ins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang_fakes import DISK, PAUSE, RELEASE, RESUME, Fake, Updated, ask, built, folder, played

from turnwise.contracts.inference import InferenceContext
from turnwise.contracts.train import Lora, Offer
from turnwise.errors import ConfigError, EngineError, EngineLost
from turnwise.testing.fake_model import FakeChat
from turnwise_serving.http import Response
from turnwise_serving.models import sees
from turnwise_sglang import links
from turnwise_sglang.api import Api
from turnwise_sglang.backend import TRIES, SglangBackend
from turnwise_sglang.config import SglangConfig
from turnwise_sglang.link import Link
from turnwise_sglang.lora import Adapter
from turnwise_sglang.memory import MEMORY
from turnwise_sglang.server import Server


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "GRACE", 0.1)


@pytest.mark.parametrize("noticed", [False, True])
def test_a_pause_finds_a_dead_server_and_starts_another(tmp_path: Path, noticed: bool) -> None:
    async def scene() -> None:
        dead, fresh = Fake(), Fake()
        backend = built(tmp_path, dead, fresh)
        dead.alive = False
        assert backend.links.current is not None
        backend.links.current.lost = noticed
        await backend.pause()
        assert dead.stopped and fresh.calls == [PAUSE]
        assert backend.links.current.api is cast(Any, fresh)

    played(scene)


def test_servers_that_die_of_every_pause_are_too_many_at_last(tmp_path: Path) -> None:
    async def scene() -> None:
        servers = [Fake(dies=(PAUSE,)) for _ in range(3)]
        backend = built(tmp_path, *servers, restarts=2)
        for _ in range(2):
            with pytest.raises(
                EngineLost, match=r"SGLang died \(signal SIGKILL\).* It was started again restarts = 2 times"
            ):
                await backend.pause()
        assert all(server.stopped for server in servers)
        stubborn = Fake(breaks=(PAUSE,))
        with pytest.raises(EngineError, match="broke off a pause again and again"):
            await built(tmp_path, stubborn, restarts=0).pause()
        assert stubborn.calls == [PAUSE] * TRIES

    played(scene)


def test_a_server_that_never_started_is_no_lost_engine(tmp_path: Path) -> None:
    async def scene() -> None:
        backend = built(tmp_path)
        for _ in range(2):
            with pytest.raises(EngineError, match="did not start") as expected:
                await backend.pause()
            assert type(expected.value) is EngineError
        dead = Fake()
        backend = built(tmp_path, dead)
        dead.alive = False
        for _ in range(2):
            with pytest.raises(EngineLost, match="did not start"):
                await backend.pause()

    played(scene)


def test_an_update_of_a_server_that_cannot_be_replaced_says_so(tmp_path: Path) -> None:
    async def scene() -> None:
        backend = built(tmp_path, Fake(dies=("/flush_cache",)), kind=Updated, restarts=0)
        with pytest.raises(EngineLost, match="started again restarts = 0 times"):
            await backend.receive(Offer("safetensors", 1, {}))
        with pytest.raises(EngineError, match="to version 1 failed half-way"):  # and nobody waits for ever
            await asyncio.wait_for(backend.generate(ask()), 5)

    played(scene)


CUDA = (
    "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\nReceived sigquit from a child"
    " process."
)


def test_a_server_that_dies_of_its_memory_reports_the_phase_and_the_keys(tmp_path: Path) -> None:
    async def scene() -> None:
        dying = Fake(dies=("/generate",))
        dying.said = CUDA
        lower = "Fix: lower mem_fraction_static, max_running_requests, chunked_prefill_size or context_length"
        with pytest.raises(
            EngineLost,
            match=rf"^out of memory, in sampling of actor_infer: SGLang died .* restarts = 0 times\. {lower}$",
        ):
            await built(tmp_path, dying, restarts=0).generate(ask())

        fix = "Fix: lower mem_fraction_static or model_update_buffer_size_mb"
        for restarts, error in ((0, EngineLost), (1, EngineError)):
            dying = Fake(dies=("/flush_cache",))
            dying.said = CUDA
            backend = built(tmp_path, dying, Fake(), kind=Updated, restarts=restarts)
            with pytest.raises(
                error, match=rf"^out of memory, in the weight update of actor_infer: SGLang died .*\. {fix}$"
            ):
                await backend.receive(Offer("safetensors", 1, {}))
            await backend.close()

    played(scene)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            CUDA,
            "out of memory, in the start of actor_infer: it died. Fix: lower mem_fraction_static, max_running_requests",
        ),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "no memory left for the cache, in the start of actor_infer",
        ),
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under",
            "no memory left for the cache, in the start of actor_infer",
        ),
        (
            "RuntimeError: Decode out of memory. Try to lower your batch size.",
            "no memory left for the cache, in the start of actor_infer",
        ),
        ("CUDA error: an illegal memory access was encountered", "it died"),
    ],
)
def test_words_about_memory_become_one_line(said: str, expected: str) -> None:
    assert MEMORY.explained("it died", said, "the start").startswith(expected)


@pytest.mark.parametrize(
    ("log", "hinted"), [("", True), ("INFO up", True), ("INFO up\nValueError: another reason", False)]
)
def test_a_server_that_was_killed_without_a_word_may_have_filled_main_memory(
    tmp_path: Path, log: str, hinted: bool
) -> None:
    # As if it had been started and killed: to start SGLang's own takes half a minute.
    server = Server.__new__(Server)
    server.log = tmp_path / "log"
    server.log.write_text(log, encoding="utf-8")
    # No public way leads to a server that has ended without being started.
    server._process = cast(Any, SimpleNamespace(poll=lambda: -9))
    hint = ": if main memory was full, lower engine_args.max_total_tokens or max_running_requests of actor_infer"
    assert server.how_it_ended() == f"signal SIGKILL{hint if hinted else ''}"


def test_a_refusal_for_lack_of_memory_reports_the_phase_of_the_call() -> None:
    async def refusal(path: str, status: int, text: str) -> str:
        async def send(*request: Any) -> Response:
            return Response(status, text=text)

        api = Api("http://h:1", 1.0)
        api.send = send  # type: ignore[method-assign]
        with pytest.raises(EngineError) as caught:
            await api.post(path)
        await api.close()
        return str(caught.value)

    text = '{"success": false, "message": "Failed to update weights: CUDA out of memory."}'
    update = asyncio.run(refusal("/update_weights_from_tensor", 400, text))
    assert update.startswith("out of memory, in the weight update of actor_infer: SGLang refused")
    wake = asyncio.run(refusal("/resume_memory_occupation", 500, text))
    assert wake.startswith("out of memory, in the wake-up of actor_infer: ")
    plain = asyncio.run(refusal("/generate", 400, '{"message": "no"}'))
    assert plain == "SGLang refused /generate (400): no"


def with_weights(backend: SglangBackend) -> SglangBackend:
    """As after an update to version 7."""
    kept = backend.links.kept
    assert kept is not None
    kept.begin()
    kept.add([("a", torch.zeros(1))])
    kept.commit(7)
    return backend


def test_a_server_that_dies_of_its_weights_counts_as_one_more_restart(tmp_path: Path) -> None:
    async def scene() -> None:
        dead, dying, fresh = Fake(), Fake(dies=(DISK,)), Fake()
        backend = with_weights(built(tmp_path, dead, dying, fresh, restarts=2))
        dead.alive = False
        await backend.pause()
        assert dying.stopped and fresh.calls == [DISK, PAUSE]
        fresh.alive = False
        with pytest.raises(EngineLost, match="restarts = 2 times"):
            await backend.pause()
        await backend.close()

    played(scene)


@pytest.mark.parametrize("how", ["refuses", "breaks"])
def test_a_server_that_does_not_take_its_weights_is_stopped(tmp_path: Path, how: str) -> None:
    async def scene() -> None:
        dead, fresh = Fake(), Fake(**cast(Any, {how: (DISK,)}))
        backend = with_weights(built(tmp_path, dead, fresh))
        dead.alive = False
        for _ in range(2):
            with pytest.raises(EngineLost, match=DISK):
                await backend.pause()
        assert fresh.stopped
        await backend.close()

    played(scene)


def test_a_server_that_is_given_an_adapter_when_the_backend_closes_is_stopped(tmp_path: Path) -> None:
    async def scene() -> None:
        dead, fresh = Fake(), Fake()
        backend = built(tmp_path, dead, fresh, lora=Lora(4, 8, None, "adapter"))
        backend.links.adapter = Adapter(3, {}, {})
        waits = asyncio.Event()

        async def loaded(path: str, body: Any = None, timeout: float | None = None) -> dict[str, Any]:
            waits.set()
            await asyncio.sleep(60)
            return {}

        fresh.post = loaded  # type: ignore[method-assign]
        dead.alive = False
        asking = asyncio.ensure_future(backend.pause())
        await waits.wait()
        await backend.close()
        assert fresh.stopped
        await asyncio.gather(asking, return_exceptions=True)

    played(scene)


def test_a_server_that_is_dead_when_it_shall_sleep_or_wake_is_replaced_later(tmp_path: Path) -> None:
    async def scene() -> None:
        dead, fresh, last = Fake(), Fake(), Fake()
        backend = built(tmp_path, dead, fresh, last, enable_memory_saver=True)
        dead.alive = False
        await backend.sleep()
        assert fresh.calls == [], "while the backend sleeps nothing takes the memory"
        await backend.wake("weights")
        await backend.pause()
        assert fresh.calls == [PAUSE]
        await backend.sleep()
        assert fresh.calls[1:] == ["/flush_cache", RELEASE]
        fresh.alive = False
        await backend.wake("weights")
        await backend.pause()
        assert last.calls == [PAUSE]
        for change, path in ((backend.sleep, RELEASE), (lambda: backend.wake("weights"), RESUME)):
            last.breaks = (path,)
            with pytest.raises(EngineError, match=f"broke off {path} and lives on"):
                await change()

    played(scene)


def test_closing_ends_the_requests_of_an_attached_server_before_its_adapter_is_unloaded(tmp_path: Path) -> None:
    async def scene() -> None:
        server = Fake()
        backend = built(tmp_path, server, base_url="http://h:1", lora=Lora(4, 8, None, "adapter"))
        assert backend.links.current is not None
        backend.links.current.adapter = "turnwise-1"
        asking = asyncio.ensure_future(backend.generate(ask()))
        while "/generate" not in server.calls:
            await asyncio.sleep(0)
        await asyncio.wait_for(backend.close(), 2)
        assert server.calls == ["/generate", "/abort_request", "/unload_lora_adapter"]
        with pytest.raises(EngineError, match="the backend was closed"):
            await asking

    played(scene)


def test_closing_does_not_wait_for_a_server_of_ours_to_end_its_requests(tmp_path: Path) -> None:
    async def scene() -> None:
        server = Fake()
        backend = built(tmp_path, server)
        asking = asyncio.ensure_future(backend.generate(ask()))
        cancelled = asyncio.ensure_future(backend.generate(ask()))
        while server.calls.count("/generate") < 2:
            await asyncio.sleep(0)
        closing = asyncio.ensure_future(backend.close())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait_for(closing, 2)
        assert server.calls == ["/generate"] * 2 and server.stopped
        with pytest.raises(EngineError, match="the backend was closed"):
            await asking
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    played(scene)


def test_what_was_sampled_after_an_update_that_failed_half_way_is_no_answer(tmp_path: Path) -> None:
    """A request that the server held back since before it does not hear of the abort, and is sampled."""

    class Failing(SglangBackend):
        async def _update(self, link: Link, offer: Offer) -> Link:
            raise EngineError("the trainer stopped sending")

    class Holding(Fake):
        async def post(self, path: str, body: Any = None, timeout: float | None = None) -> dict[str, Any]:
            answer = await super().post(path, body, timeout)
            facts = {
                "finish_reason": {"type": "stop"},
                "output_token_logprobs": [[-1.0, 4, None]],
                "weight_versions": [{"version": "0", "start": 0, "end": 1}],
            }
            return {"output_ids": [4], "meta_info": facts} if path == "/generate" else answer

    async def scene() -> None:
        server = Holding()
        backend = built(tmp_path, server, kind=Failing)
        asking = asyncio.ensure_future(backend.generate(ask()))
        while "/generate" not in server.calls:
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="the trainer stopped sending"):
            await backend.receive(Offer("shared_memory", 3, {}))
        with pytest.raises(EngineError, match="the weight update to version 3 failed half-way"):
            await asking

    played(scene)


def test_the_time_of_a_response_leaves_pauses_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def passes(seconds: float) -> None:
        nonlocal now
        now += seconds
        for _ in range(9):
            await asyncio.sleep(0)

    async def scene() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        server = Fake()
        backend = built(tmp_path, server, request_timeout=10.0)
        asking = asyncio.ensure_future(backend.generate(ask()))
        while "/generate" not in server.calls:
            await asyncio.sleep(0)
        await passes(6)
        await backend.pause()
        await passes(100)
        await backend.resume()
        await passes(3)
        assert not asking.done()
        await passes(2)
        assert asking.done()
        with pytest.raises(EngineError, match=r"SGLang did not answer within request_timeout = 10 s\. Fix: raise it"):
            await asking

    asyncio.run(scene())


def test_what_only_the_models_folder_says_is_asked_again_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeing = folder(tmp_path, '{"vocab_size": 32, "vision_config": {}}')
    monkeypatch.chdir(seeing)
    assert sees(seeing) and not sees(Path()) and not sees(None)
    chat, lora = FakeChat(end=2), Lora(4, 8, None, "adapter")
    attached = SglangConfig(base_url="http://h:1")
    assert SglangBackend.check(attached, InferenceContext(Path(), chat, lora=lora)) == []
    with pytest.raises(ConfigError, match="adapters alone for a model that takes images are not supported by sglang"):
        SglangBackend(SglangConfig(), InferenceContext(seeing, chat, lora=lora))
    (line,) = map(str, SglangBackend.check(attached, InferenceContext(seeing, chat)))
    assert line.endswith(
        "base_url: an attached SGLang server may keep features of images from old weights. Fix: python in place of"
        " base_url"
    )
    with pytest.raises(ConfigError, match="an attached SGLang server may keep features"):
        SglangBackend(attached, InferenceContext(seeing, chat))
    SglangBackend(SglangConfig(), InferenceContext(seeing, chat))
