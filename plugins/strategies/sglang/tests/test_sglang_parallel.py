"""Servers of two processes, and of half precision: log-probs are the model's before and after weights came by every
transport that they have, and between two tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch
from sglang_served import goes_on

from turnwise.contracts.inference import GeneratingArgs, Request
from turnwise.contracts.train import Offer
from turnwise.data.trajectory import int32
from turnwise_sglang import fixtures
from turnwise_sglang.arguments import environment
from turnwise_sglang.backend import SglangBackend
from turnwise_sglang.config import SglangConfig
from turnwise_torch.broadcast import Hub
from turnwise_torch.models import load_causal_lm
from turnwise_torch.stream import Sender, buckets

ATOL, FAR = 1e-4, 1.0
LONGEST = 300.0
TRANSPORTS = {
    "tp_size": ("shared_memory", "process_group", "safetensors"),
    "pp_size": ("shared_memory", "safetensors"),
    "dp_size": ("safetensors",),
}


def test_every_rank_on_the_cpu_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(**sizes: int) -> str | None:
        return environment(SglangConfig(**sizes), fixtures.context()).get("SGLANG_CPU_OMP_THREADS_BIND")

    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 4, 5, 7})
    assert bound() is None
    assert bound(tp_size=2) == "0,1|4,5"
    assert bound(tp_size=2, dp_size=2) == "0|1|4|5"
    assert bound(tp_size=3, pp_size=2) == "0|1|4|5|7|0"
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0-1|2-3")
    assert bound(tp_size=2) == "0-1|2-3"


@pytest.mark.engines
@pytest.mark.matrix
@pytest.mark.parametrize("size", TRANSPORTS)
def test_log_probs_of_two_processes_are_the_models_before_and_after_updates(size: str) -> None:
    served({size: 2}, "fp32", TRANSPORTS[size], ATOL)


@pytest.mark.engines
@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_in_fp32_are_cast_to_the_servers_precision(dtype: str) -> None:
    served(
        {}, dtype, TRANSPORTS["tp_size"], 0.15
    )  # twice what 8 bits of a mantissa round to here; other weights are off by more than 1


def served(sizes: dict[str, int], dtype: str, transports: tuple[str, ...], atol: float) -> None:
    """A server of its own: its log-probs before an update, after one by each transport, and on both sides of one between
    two tokens."""
    config = SglangConfig(python=fixtures.interpreter(), start_timeout=LONGEST, **sizes)
    with asyncio.Runner() as runner:

        def run(work: Coroutine[Any, Any, Any]) -> Any:
            return runner.run(asyncio.wait_for(work, LONGEST))

        async def build() -> SglangBackend:
            return SglangBackend(config, fixtures.context(dtype=dtype))

        backend = run(build())
        try:
            assert backend.transports(config, fixtures.context(dtype=dtype)) == transports
            parity(run, backend, 0, atol)
            for version, transport in enumerate(transports, 1):
                assert run(update(backend, transport, version, version % 2)) == version
                parity(run, backend, version, atol)
            # Rounded to half precision, tokens of nearly equal probability may be the others another time.
            if dtype == "fp32":
                run(goes_on(backend, transports[0], 0.7))
        finally:
            run(backend.close())


def parity(run: Callable[[Any], Any], backend: SglangBackend, version: int, atol: float) -> None:
    """Log-probs are those of the weights of `version`, and far from those of the version before."""

    async def scene() -> list[Any]:
        return list(await asyncio.gather(*map(backend.generate, requests)))

    temperatures = (0.7, 1.0, 0.7, 1.0)
    requests = [
        Request(n, GeneratingArgs(12, t), 12, (0, 0, n, 0, 0), ids=int32((1, 12, 13, 14, 2)))
        for n, t in enumerate(temperatures)
    ]
    for request, answer in zip(requests, run(scene()), strict=True):
        ids = np.concatenate([request.ids, answer.ids])
        expected, other = (
            fixtures.reference_logprobs(ids, request.args.temperature, fixtures.model(m % 2))[-len(answer.ids) :]
            for m in (version, version + 1)
        )
        assert set(answer.versions.tolist()) == {version}
        assert np.abs(answer.logprobs - expected).max() < atol
        assert np.abs(answer.logprobs - other).max() > FAR


async def update(backend: SglangBackend, transport: str, version: int, model: int) -> int:
    """The weights of the model of `model` by `transport`."""
    if transport == "safetensors":
        return await backend.receive(Offer(transport, version, {"folder": str(fixtures.model(model))}))
    hub = Hub("", torch.device("cpu"), 60.0)
    sender: Any = (
        Sender(backend.receivers(transport), 60.0)
        if transport == "shared_memory"
        else hub.sender(backend.receivers(transport))
    )
    state = load_causal_lm(fixtures.model(model), "fp32", "eager").state_dict()
    sending = asyncio.create_task(asyncio.to_thread(sender.send, buckets(state.items(), 1)))
    try:
        return await backend.receive(Offer(transport, version, sender.payload))
    finally:
        await asyncio.gather(sending, return_exceptions=True)
        hub.close()
