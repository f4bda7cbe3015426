"""The real engine as a server: the conformance kit over an attached one, the same log-probs and updates over HTTP,
errors that name the cause."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from vllm_cases import NEEDS_VLLM, WARNS

from turnwise.contracts.train import Lora, Offer
from turnwise.errors import ConfigError, EngineError, EngineLost
from turnwise.testing.kit import run_conformance

pytestmark = [pytest.mark.engines, NEEDS_VLLM, pytest.mark.timeout(240), WARNS]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for the file."""
    with asyncio.Runner() as shared:
        yield shared


@pytest.fixture
def given() -> Any:
    """`config` and `context` of a backend that is attached to the server that the kit uses too."""
    from turnwise_vllm import fixtures

    return SimpleNamespace(config=fixtures.attach(fixtures.server()), context=fixtures.model_context())


@pytest.fixture
def attached(runner: asyncio.Runner, given: Any) -> Iterator[Any]:
    """That backend."""
    from turnwise_vllm.backend import VllmBackend

    backend = VllmBackend(given.config, given.context)
    yield backend
    runner.run(backend.close())


def test_the_conformance_kit_passes_with_the_real_engine() -> None:
    assert run_conformance("vllm", "inference_backend", strict=True) == 0


@pytest.mark.parametrize("key", [None, "another"])
def test_who_lacks_the_servers_key_gets_nothing_from_it(key: str | None) -> None:
    import psutil

    from turnwise_serving.http import Client
    from turnwise_vllm import fixtures

    server = fixtures.server()
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    assert not any(server.key in word for process in family for word in process.cmdline())

    async def scene() -> list[int]:
        client = Client(server.url, 30.0, key)
        calls = [
            ("POST", path)
            for path in (
                "/inference/v1/generate",
                "/v1/completions",
                "/collective_rpc",
                "/update_weights",
                "/pause",
                "/sleep",
            )
        ]
        statuses = [
            (await client.send(method, path, {})).status_code
            for method, path in [*calls, ("GET", "/server_info"), ("GET", "/metrics")]
        ]
        assert await client.healthy()
        await client.close()
        return statuses

    assert set(asyncio.run(scene())) == {401}


def test_weights_stream_into_the_server_and_cached_prompts_are_read_again(
    runner: asyncio.Runner, attached: Any
) -> None:
    import threading

    import numpy as np
    import torch

    from turnwise.contracts.inference import GeneratingArgs, Request
    from turnwise_torch.fixtures import log_probs
    from turnwise_torch.models import load_causal_lm
    from turnwise_torch.stream import Sender, buckets
    from turnwise_vllm.fixtures import model_context

    model = load_causal_lm(model_context().model, "fp32", "eager")
    ids = np.random.default_rng(0).integers(3, 20, 140).astype(np.int32)
    request = Request(1, GeneratingArgs(8, 0.7), 8, ids=ids)

    async def scene() -> Any:
        await attached.receive(Offer("safetensors", 5, {"folder": str(model_context().model)}))
        before = await attached.generate(request)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
        sender = Sender(1, 60)
        thread = threading.Thread(target=lambda: sender.send(buckets(model.state_dict().items(), 20_000)))
        thread.start()
        assert await attached.receive(Offer("shared_memory", 6, sender.payload)) == 6
        thread.join()
        return before, await attached.generate(request)

    before, after = runner.run(scene())
    assert set(before.versions.tolist()) == {5}
    assert set(after.versions.tolist()) == {6}
    expected = log_probs(model, np.concatenate([ids, after.ids]), 0.7)[-len(after.ids) :]
    np.testing.assert_allclose(after.logprobs, expected, atol=1e-4, rtol=0)


def test_an_update_that_fails_is_reported_and_a_whole_one_repairs(
    runner: asyncio.Runner, attached: Any, tmp_path: Path
) -> None:
    from turnwise_vllm.fixtures import backend_fixture

    supplied = backend_fixture()
    with pytest.raises(EngineError, match="no safetensors weights in"):
        runner.run(attached.receive(Offer("safetensors", 7, {"folder": str(tmp_path)})))
    with pytest.raises(EngineError, match="mixture of weights"):
        runner.run(attached.generate(supplied["request"](0)))
    assert runner.run(attached.receive(supplied["offer"](8))) == 8
    assert set(runner.run(attached.generate(supplied["request"](0))).versions.tolist()) == {8}


def test_a_server_that_does_not_fit_the_run_is_reported_with_the_options_it_needs(
    runner: asyncio.Runner, given: Any
) -> None:
    from turnwise_vllm.backend import VllmBackend

    config = evolve(given.config, logprobs_mode="raw_logprobs")
    backend = VllmBackend(config, evolve(given.context, sequence_length=4096))
    with pytest.raises(
        ConfigError, match=r"does not fit this run.*--logprobs-mode raw_logprobs .*--max-model-len 4096"
    ):
        runner.run(backend.pause())
    runner.run(backend.close())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"updates": False}, "no weights will be sent"),
        ({"lora": Lora(4, 8, None, "adapter")}, "only adapters will be sent"),
    ],
)
def test_a_server_of_another_model_is_refused_where_no_whole_weights_come(
    runner: asyncio.Runner, given: Any, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    from turnwise_vllm.backend import VllmBackend

    held = given.context.model
    other = shutil.copytree(held, tmp_path / "model")
    backend = VllmBackend(given.config, evolve(given.context, model=other, **changes))
    with pytest.raises(ConfigError, match=rf"Fix: start it with --model {other} \(it has {held}, and {why}\)"):
        runner.run(backend.pause())
    runner.run(backend.close())
    for context in (evolve(given.context, model=other), evolve(given.context, updates=False)):
        backend = VllmBackend(given.config, context)
        runner.run(backend.pause())
        runner.run(backend.resume())
        runner.run(backend.close())


def test_a_server_of_another_dtype_is_always_refused(runner: asyncio.Runner, given: Any) -> None:
    from turnwise_vllm.backend import VllmBackend

    backend = VllmBackend(given.config, evolve(given.context, dtype="bf16"))
    with pytest.raises(ConfigError, match=r"Fix: start it with --dtype bfloat16 \(it has float32\)$"):
        runner.run(backend.pause())
    runner.run(backend.close())


def test_a_server_of_other_sizes_is_reported_with_both(runner: asyncio.Runner, given: Any) -> None:
    from turnwise_vllm.backend import VllmBackend

    backend = VllmBackend(evolve(given.config, engine_args={"data_parallel_size": 2}), given.context)
    with pytest.raises(ConfigError, match=r"has data_parallel_size 1, the configuration 2\. Fix: write the server's"):
        runner.run(backend.pause())
    runner.run(backend.close())


def test_a_connection_that_breaks_off_fails_its_request_alone(
    runner: asyncio.Runner, attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turnwise_serving.http import Gone
    from turnwise_vllm.fixtures import backend_fixture

    runner.run(attached.pause())
    runner.run(attached.resume())
    # Only here does a connection break off at a moment that the test knows.
    client, broken = attached.engine._client, []
    real = client.send

    async def once(method: str, path: str, *more: Any, **options: Any) -> Any:
        if not broken:
            broken.append(1)
            raise Gone("the connection was closed")
        return await real(method, path, *more, **options)

    monkeypatch.setattr(client, "send", once)
    request = backend_fixture()["request"](0)
    with pytest.raises(EngineError, match="the vLLM server broke off /inference/v1/generate") as error:
        runner.run(attached.generate(request))
    assert not isinstance(error.value, EngineLost)
    assert len(runner.run(attached.generate(request)).ids)


def test_an_address_where_nobody_answers_is_reported_at_once(runner: asyncio.Runner, given: Any) -> None:
    from turnwise.ports import free_port
    from turnwise_vllm.backend import VllmBackend

    backend = VllmBackend(evolve(given.config, base_url=f"http://127.0.0.1:{free_port()}"), given.context)
    with pytest.raises(EngineError, match=r"does not answer. Fix: start it, correct base_url"):
        runner.run(asyncio.wait_for(backend.pause(), 20))
    runner.run(backend.close())


def test_a_server_that_dies_fails_every_request_at_once(runner: asyncio.Runner, attached: Any) -> None:
    """The last test of this file: the server is gone after it."""
    from turnwise_vllm import fixtures
    from turnwise_vllm.fixtures import backend_fixture

    request = backend_fixture()["request"]

    async def scene() -> list[Any]:
        await attached.pause()  # so that the requests are there when it dies
        tasks = [asyncio.create_task(attached.generate(request(seed))) for seed in range(3)]
        await asyncio.sleep(0.5)
        os.killpg(fixtures.server().pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)

    for error in runner.run(scene()):
        assert isinstance(error, EngineLost)
        assert "is gone" in str(error)
    with pytest.raises(EngineLost, match="is gone"):
        runner.run(attached.generate(request(0)))
    fixtures.server.cache_clear()
