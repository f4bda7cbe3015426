"""Adapters alone, in the real engine: its log-probs are a PEFT model's, whatever brought the adapter and whenever it
came."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sglang_served import ROUNDS, longest_first, under_way

from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.contracts.train import Lora, Offer
from turnwise.data.trajectory import Generation, int32
from turnwise.errors import EngineError
from turnwise_sglang import fixtures
from turnwise_sglang.backend import SglangBackend
from turnwise_sglang.config import SglangConfig
from turnwise_torch.broadcast import Hub
from turnwise_torch.models import load_causal_lm
from turnwise_torch.stream import Sender, buckets

peft = pytest.importorskip("peft", reason="the expected log-probs are a PEFT model's")
pytestmark = [pytest.mark.engines]
ATOL = 1e-4
LONGEST = 240.0
RANK, ALPHA = 4, 6
Adapters = Callable[[int], Path]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """Folders that PEFT itself wrote, by seed: an even one adapts every linear layer, an odd one PEFT's choice for the
    model."""

    @functools.cache
    def written(seed: int) -> Path:
        config = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=None if seed % 2 else "all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(load_causal_lm(fixtures.model(), "fp32", "eager"), config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data.normal_(0, 0.2, generator=generator)
        folder = tmp_path_factory.mktemp(f"adapter-{seed}")
        model.save_pretrained(str(folder))
        return Path(folder)

    return written


@functools.cache
def adapted(folder: Path | None) -> Any:
    model = load_causal_lm(fixtures.model(), "fp32", "eager")
    return model if folder is None else peft.PeftModel.from_pretrained(model, str(folder)).eval()


def ask(seed: int = 0, limit: int = 40, ids: tuple[int, ...] = (1, 12, 13, 14, 2), **args: Any) -> Request:
    return Request(
        seed, GeneratingArgs(**{"max_new_tokens": limit, "temperature": 0.7, **args}), limit, (seed,), ids=int32(ids)
    )


def differences(request: Request, answer: Generation, folder: Path | None) -> np.ndarray:
    """|log-prob − that of a forward pass of the model with the adapter of `folder`| for every token."""
    assert request.ids is not None and answer.ids is not None and answer.logprobs is not None
    tokens = torch.tensor(np.concatenate([request.ids, answer.ids]).astype(np.int64))
    with torch.no_grad():
        logits = adapted(folder)(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    expected = torch.log_softmax(logits / request.args.temperature, -1).gather(1, tokens[1:, None])[:, 0]
    return np.abs(answer.logprobs - expected[len(request.ids) - 1 :].numpy())


@pytest.fixture(scope="module")
def backend(run: Any) -> Iterator[SglangBackend]:
    async def build() -> SglangBackend:
        lora = Lora(RANK, ALPHA, "all-linear", "adapter")
        # Fewer at once than the tests ask for: an update finds requests in the server's queue as well.
        config = SglangConfig(python=fixtures.interpreter(), start_timeout=LONGEST, max_running_requests=4)
        return SglangBackend(config, fixtures.context(lora=lora))

    built = run(build())
    yield built
    run(built.close())


def offered(folder: Path, version: int, transport: str, payload: dict[str, Any]) -> Offer:
    return Offer(transport, version, payload, json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")))


async def bring(
    backend: SglangBackend,
    folder: Path,
    version: int,
    transport: str,
    hub: Hub | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> int:
    """As a trainer does."""
    if transport == "safetensors":
        return await backend.receive(offered(folder, version, transport, {"folder": str(folder)}))
    sender: Any = Sender(1, 60.0) if hub is None else hub.sender(1)
    tensors = load_file(folder / "adapter_model.safetensors") if tensors is None else tensors
    sending = asyncio.create_task(asyncio.to_thread(sender.send, buckets(tensors.items(), 1)))
    try:
        return await backend.receive(offered(folder, version, transport, sender.payload))
    finally:
        await asyncio.gather(sending, return_exceptions=True)


def parity(backend: SglangBackend, run: Any, version: int, folder: Path | None, other: Path | None) -> None:
    async def scene() -> list[Generation]:
        return list(await asyncio.gather(*map(backend.generate, requests)))

    requests = [ask(seed, temperature=temperature) for seed in range(3) for temperature in (0.7, 1.0)]
    for request, answer in zip(requests, run(scene()), strict=True):
        assert set(answer.versions.tolist()) == {version}
        assert differences(request, answer, folder).max() < ATOL
        assert differences(request, answer, other).max() > 0.1


def test_the_model_without_an_adapter_serves_until_the_first_one_comes(
    backend: SglangBackend, run: Any, adapters: Adapters
) -> None:
    parity(backend, run, 0, None, adapters(0))


def test_log_probs_are_the_peft_models_after_every_transport(
    backend: SglangBackend, run: Any, adapters: Adapters
) -> None:
    hub = Hub("", torch.device("cpu"), 60.0)
    for version, transport in enumerate(("safetensors", "shared_memory", "process_group", "process_group"), start=1):
        assert (
            run(bring(backend, adapters(version), version, transport, hub if transport == "process_group" else None))
            == version
        )
        parity(backend, run, version, adapters(version), adapters(version - 1))
    hub.close()
    named = run(backend.links.current.api.get("/v1/models"))["data"]  # type: ignore[union-attr]
    assert [facts["id"].startswith("turnwise-4-") for facts in named if facts.get("parent")] == [True], (
        "the adapters before it were unloaded"
    )


@pytest.mark.matrix
@pytest.mark.parametrize("size", ["tp_size", "pp_size"])
def test_an_adapter_reaches_every_process_of_a_server(run: Any, adapters: Adapters, size: str) -> None:
    async def build() -> SglangBackend:
        config = SglangConfig(python=fixtures.interpreter(), start_timeout=LONGEST, **{size: 2})
        return SglangBackend(config, fixtures.context(lora=Lora(RANK, ALPHA, "all-linear", "adapter")))

    backend = run(build())
    try:
        for version, transport in enumerate(("safetensors", "shared_memory"), start=1):
            assert run(bring(backend, adapters(version), version, transport)) == version
            parity(backend, run, version, adapters(version), adapters(version - 1))
    finally:
        run(backend.close())


def test_an_adapter_that_arrives_in_mid_generation_divides_the_response(
    backend: SglangBackend, run: Any, adapters: Adapters
) -> None:
    """Tokens before the cut are the old adapter's, those after it the new one's, recomputed from the ids."""
    run(bring(backend, adapters(2), 5, "safetensors"))
    requests = list(run(longest_first(backend, [ask(seed, limit=400, ids=(12,)) for seed in range(12)])))

    async def scene(version: int, folder: Path) -> list[Generation]:
        tasks = await under_way(backend, requests)
        assert await bring(backend, folder, version, "shared_memory") == version
        return list(await asyncio.gather(*tasks))

    def divided(answers: list[Generation]) -> list[tuple[Request, Generation]]:
        return [(r, a) for r, a in zip(requests, answers, strict=True) if len(set(a.versions.tolist())) == 2]

    for _ in range(ROUNDS):
        if found := divided(run(scene(6, adapters(1)))):
            break
        run(bring(backend, adapters(2), 5, "safetensors"))
    request, answer = found[0]
    assert answer.versions.tolist() == sorted(answer.versions.tolist())
    for version, seed in ((5, 2), (6, 1)):
        of = answer.versions == version
        assert differences(request, answer, adapters(seed))[of].max() < ATOL
        assert differences(request, answer, adapters(3 - seed))[of].max() > 0.1
    for version in range(7, 17):  # equal weights: the cut leaves no trace in the tokens
        if divided(same := run(scene(version, adapters(1)))):
            break
    assert divided(same)
    whole = run(scene(17, adapters(1)))
    assert [a.ids.tolist() for a in same] == [a.ids.tolist() for a in whole]


def test_what_is_no_adapter_of_the_model_is_refused(
    backend: SglangBackend, run: Any, adapters: Adapters, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="brings whole weights, and SGLang was started for adapters alone"):
        run(backend.receive(Offer("safetensors", 9, {"folder": str(fixtures.model())})))
    with pytest.raises(EngineError, match="cannot read the adapters in"):
        run(backend.receive(offered(adapters(1), 9, "safetensors", {"folder": str(tmp_path)})))
    first, *_ = load_file(adapters(1) / "adapter_model.safetensors").items()
    for name, tensor, message in (
        (first[0].replace("layers.0", "layers.9"), first[1], "layers.9.*for which the model's folder holds no weight"),
        (first[0], first[1][:, :3].clone(), r"has shape \(4, 3\), rank 4 of .* is \(4, 64\)"),
    ):
        with pytest.raises(EngineError, match=message):
            run(bring(backend, adapters(1), 9, "shared_memory", tensors={name: tensor}))
    with pytest.raises(EngineError, match="failed half-way, so nothing may be sampled"):
        run(backend.generate(ask()))
    assert run(bring(backend, adapters(1), 9, "safetensors")) == 9
    parity(backend, run, 9, adapters(1), adapters(0))


@pytest.mark.matrix
def test_a_killed_server_is_replaced_with_the_adapter_it_had(
    backend: SglangBackend, run: Any, adapters: Adapters
) -> None:
    """The last test of this server."""

    async def scene() -> tuple[list[Generation], list[Generation]]:
        await bring(backend, adapters(2), 10, "shared_memory")
        expected = await longest_first(backend, [ask(seed, limit=300, ids=(12,)) for seed in range(8)])
        tasks = await under_way(backend, list(expected))
        os.kill(backend.links.current.server.pid, signal.SIGKILL)  # type: ignore[union-attr]
        return list(expected.values()), list(await asyncio.gather(*tasks))

    expected, answers = run(scene())
    assert [a.ids.tolist() for a in answers] == [a.ids.tolist() for a in expected]
    assert {version for a in answers for version in a.versions.tolist()} == {10}
    parity(backend, run, 10, adapters(2), None)
