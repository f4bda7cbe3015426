"""Calls, requests under way, answers and offers, without an engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.contracts.train import Lora, Offer
from turnwise.errors import ConfigError, EngineError
from turnwise.ports import free_port
from turnwise_serving.answers import cut, token_versions
from turnwise_serving.http import Client, Gone, Refused, Slow, reason
from turnwise_serving.memory import SAMPLING, UPDATE, WAKE, Memory
from turnwise_serving.models import facts, other_model, sees, vocabulary
from turnwise_serving.offers import check_offer
from turnwise_serving.running import CLOSED, Running

MEMORY = Memory(
    "share",
    "share or batch",
    "no cache",
    "lower batch",
    {WAKE: ("wake",), UPDATE: ("weight",)},
    "batch",
    {"odd": "the odd key"},
)


class Handler(BaseHTTPRequestHandler):
    """Tells what it was sent; waits, breaks off, refuses or streams by the path."""

    released = threading.Event()

    def do_GET(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def answer(self, sent: bytes) -> None:
        if self.path == "/slow":
            self.released.wait(30)
        if self.path == "/breaks":
            self.connection.close()
            return
        text = json.dumps(
            {"sent": sent.decode(), "key": self.headers.get("Authorization"), "own": self.headers.get("X-Own")}
        ).encode()
        if self.path == "/events":
            text = b'data: {"a": 1}\n\n: a comment\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n'
        self.send_response(503 if self.path == "/refuses" else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def url() -> Iterator[str]:
    Handler.released.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        Handler.released.set()
        server.shutdown()
        thread.join()


def test_a_call_carries_the_key_its_headers_and_json_and_each_failure_is_one_of_three(url: str) -> None:
    async def scene() -> None:
        client = Client(url, 5.0, key="k")
        answer = (await client.send("POST", "/x", {"a": [1]}, headers={"X-Own": "o"})).json()
        assert answer == {"sent": '{"a": [1]}', "key": "Bearer k", "own": "o"}
        assert (await client.send("POST", "/x", b"{}")).json()["sent"] == "{}"
        assert await client.healthy()
        assert (await client.send("GET", "/refuses")).status_code == 503
        with pytest.raises(Slow):
            await client.send("GET", "/slow", timeout=0.05)
        with pytest.raises(Gone, match="RemoteProtocolError"):
            await client.send("GET", "/breaks")
        assert [json.loads(event)["a"] async for event in client.events("/events", {}, 5.0)] == [1, 2]
        with pytest.raises(Refused) as refused:
            [event async for event in client.events("/refuses", {}, 5.0)]
        assert refused.value.status == 503
        await client.close()
        with pytest.raises(Gone):
            await client.send("GET", "/x")
        with pytest.raises(Gone):
            [event async for event in client.events("/events", {}, 5.0)]
        absent = Client(f"http://127.0.0.1:{free_port()}", 5.0)
        assert not await absent.healthy()
        await absent.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"error": {"message": "bad\\n key"}}', "bad key"),
        ('{"success": false, "message": "no room"}', "no room"),
        ('{"error_message": "x"}', "x"),
        ('{"detail": [{"loc": 1}]}', "[{'loc': 1}]"),
        ('{"error": "y"}', "y"),
        ("<html>\nbusy", "<html> busy"),
        ("[1]", "[1]"),
        ("", "no reason"),
    ],
)
def test_the_reason_of_a_refusal_is_the_message_in_it_on_one_line(text: str, why: str) -> None:
    assert reason(text) == why
    assert len(reason("x" * 1000, 300)) == 300


def test_requests_are_given_up_one_by_one_or_all_at_once_with_a_reason() -> None:
    async def scene() -> None:
        running, requests = Running(), [Request(seed, GeneratingArgs(), 1) for seed in range(4)]
        asked = [asyncio.ensure_future(running.of(request, asyncio.sleep(60, request.seed))) for request in requests]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.abort(requests[0])
        asked[1].cancel()
        results = await asyncio.gather(*asked[:2], return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2
        running.break_off("it broke")
        for task in asked[2:]:
            with pytest.raises(EngineError, match="it broke"):
                await task
        assert await running.of(requests[0], asyncio.sleep(0, 5)) == 5
        last = asyncio.ensure_future(running.of(requests[0], asyncio.sleep(60)))
        await asyncio.sleep(0)
        await running.close()
        with pytest.raises(EngineError, match=CLOSED):
            await last

    asyncio.run(asyncio.wait_for(scene(), 20))


def test_no_time_passes_for_requests_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def passes(seconds: float) -> None:
        nonlocal now
        now += seconds
        for _ in range(5):
            await asyncio.sleep(0)

    async def scene() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        running, ends = Running(10.0, "it took too long"), asyncio.Event()
        first, second = (Request(seed, GeneratingArgs(), 1) for seed in range(2))
        before = asyncio.ensure_future(running.of(first, ends.wait()))
        await passes(0)
        await passes(6)
        running.pause()
        running.pause()
        within = asyncio.ensure_future(running.of(second, ends.wait()))
        await passes(100)
        assert not before.done()
        assert not within.done()
        running.resume()
        await passes(3)
        assert not before.done()
        await passes(2)
        with pytest.raises(EngineError, match="it took too long"):
            await before
        assert not within.done()
        ends.set()
        assert await within
        assert await running.of(first, asyncio.sleep(0, 5)) == 5

    asyncio.run(scene())


def test_who_cancels_its_own_request_while_all_are_given_up_is_cancelled() -> None:
    async def scene() -> None:
        running = Running()
        task = asyncio.ensure_future(running.of(Request(0, GeneratingArgs(), 1), asyncio.sleep(60)))
        await asyncio.sleep(0)
        running.break_off("it broke")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("name", "said", "line"),
    [
        (
            "/weights",
            "torch: CUDA out of memory",
            "out of memory, in the weight update of actor_infer: it died. Fix: lower share or model_update_",
        ),
        (
            "/wake",
            "MemoryError",
            "out of memory, in the wake-up of actor_infer: it died. Fix: lower share, or give it devices of its own",
        ),
        ("/generate", "MemoryError", "out of memory, in sampling of actor_infer: it died. Fix: lower share or batch"),
        (
            "/generate",
            "no cache, out of memory",
            "no memory left for the cache, in sampling of actor_infer: it died. Fix: lower batch",
        ),
        (
            "/generate",
            "odd, out of memory",
            "out of memory, in sampling of actor_infer: it died. Fix: lower the odd key",
        ),
        ("/generate", "an illegal access", "it died."),
    ],
)
def test_too_little_memory_is_one_line_with_the_phase_and_the_keys(name: str, said: str, line: str) -> None:
    assert MEMORY.explained("it died.", f"Traceback\n{said}", MEMORY.phase(name)).startswith(line)
    assert MEMORY.phase("/pause") == SAMPLING


def test_text_ends_at_the_first_stop_string() -> None:
    args = GeneratingArgs(stop_strings=("c", "bc"))
    assert cut("abcd", args) == "abc"
    assert cut("abcd", GeneratingArgs(stop_strings=("c", "bc"), include_stop_str_in_output=False)) == "a"
    assert cut("xyz", args) == "xyz"


def test_every_token_carries_the_version_of_its_span() -> None:
    assert token_versions([("default", 0, 2), ("7", 2, 5)], 5, "Warp").tolist() == [0, 0, 7, 7, 7]
    with pytest.raises(EngineError, match=r"^Warp reported the weight version of 2 of 3 tokens\. Fix: a newer one$"):
        token_versions([("7", 0, 2)], 3, "Warp", "a newer one")


def test_a_folder_says_its_vocabulary_and_whether_it_takes_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 3, "text_config": {"vocab_size": 9, "head_dim": null}, "vision_config": {}}'
    )
    assert facts(tmp_path)["vocab_size"] == vocabulary(tmp_path) == 9
    assert sees(tmp_path) and not sees(tmp_path / "absent") and not sees(None) and not sees(Path())
    for text in ("{}", "[]", "no json", '{"text_config": null}', '{"vocab_size": null}'):
        (tmp_path / "config.json").write_text(text)
        assert not sees(tmp_path)
        with pytest.raises(ConfigError, match="is no language model's folder"):
            vocabulary(tmp_path)


def test_a_server_of_another_model_serves_only_where_whole_weights_come(tmp_path: Path) -> None:
    lora = Lora(4, 8, None, "adapter")
    assert other_model(InferenceContext(tmp_path, None), "/other") == ""
    assert other_model(InferenceContext(tmp_path, None, updates=False), str(tmp_path)) == ""
    assert other_model(InferenceContext(tmp_path, None, updates=False), "/other") == "no weights will be sent"
    assert other_model(InferenceContext(tmp_path, None, lora=lora), "/other") == "only adapters will be sent"


def test_an_offer_that_the_engine_was_not_started_for_is_refused() -> None:
    lora = Lora(4, 8, None, "adapter")
    check_offer(Offer("a", 1, {}), "Warp", ("a",), None)
    with pytest.raises(EngineError, match=r"the warp backend cannot receive weights by 'b'\. Known: a"):
        check_offer(Offer("b", 1, {}), "Warp", ("a",), None)
    with pytest.raises(EngineError, match="brings whole weights, and Warp was started for adapters alone"):
        check_offer(Offer("a", 1, {}), "Warp", ("a",), lora)
    with pytest.raises(EngineError, match="brings adapters alone, and Warp was started for whole weights"):
        check_offer(Offer("a", 1, {}, {"r": 1}), "Warp", ("a",), None)
