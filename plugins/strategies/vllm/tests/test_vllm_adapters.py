"""Adapters alone over vLLM's own weights: log-probs are those of PEFT's model, from the first update on and across one
in mid-generation."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from vllm_cases import CLOSE, FAR, IN_PROCESS, under_way

from turnwise.contracts.inference import Request
from turnwise.contracts.train import Lora, Offer
from turnwise.errors import EngineError, EngineLost

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300), *IN_PROCESS]


class Trainer:
    """The base model, and PEFT's adapters over it."""

    def __init__(self, folder: Path, adapted: Callable[..., Any]) -> None:
        from turnwise_torch.models import load_causal_lm

        self.base = load_causal_lm(folder, "fp32", "eager")
        self.adapters = functools.partial(adapted, folder)


@pytest.fixture(scope="module")
def bench(make_lab: Callable[..., Any], adapted: Callable[..., Any]) -> Iterator[tuple[Any, Trainer]]:
    """An engine that takes adapters of rank 4, and the trainer."""
    lab = make_lab({"load_format": "auto"}, lora=Lora(4, 6, sync="adapter"), sequence_length=512)
    yield lab, Trainer(lab.context.model, adapted)
    lab.close()


def in_flight(lab: Any, request: Request, update: Callable[[], Any]) -> Any:
    """The answer to a long request, of which some tokens came before `update()` and some after it."""

    async def scene() -> Any:
        task = asyncio.create_task(lab.backend.generate(request))
        await under_way(lab, 1, 5)
        await update()
        return await task

    answer = lab.runner.run(scene())
    assert sorted(set(answer.versions.tolist())) == [lab.version - 1, lab.version]
    return answer


def test_the_base_serves_until_the_first_adapters_come_which_may_be_in_mid_generation(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, trainer = bench
    monkeypatch.setattr(lab.context.chat, "stop_ids", ())
    requests = [lab.request(seed, prompt=seed, temperature=t) for seed, t in enumerate((0.7, 1.0))]
    for request, answer in zip(requests, lab.ask(*requests), strict=True):
        assert set(answer.versions.tolist()) == {0}
        assert lab.off(trainer.base, request, answer) < CLOSE
    model, tensors, config = trainer.adapters(1)
    request = lab.request(2, tokens=480, temperature=0.7)
    answer = in_flight(lab, request, lambda: lab.send(tensors.items(), adapter=config))
    before = answer.versions == 0
    assert lab.off(trainer.base, request, answer, before) < CLOSE
    assert lab.off(model, request, answer, ~before) < CLOSE
    assert lab.off(trainer.base, request, answer, ~before) > FAR


@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "safetensors"])
def test_log_probs_are_those_of_pefts_model_after_an_update(bench: Any, tmp_path: Path, transport: str) -> None:
    import torch

    from turnwise_torch.broadcast import Hub

    lab, trainer = bench
    assert lab.backend.receivers("shared_memory") == 1
    model, tensors, config = trainer.adapters(2 + len(transport), place=tmp_path)
    cached = lab.request(7, length=140)
    lab.ask(cached)  # its prompt is in the cache of the adapters before
    if transport == "safetensors":
        lab.version += 1
        assert (
            lab.runner.run(lab.backend.receive(Offer(transport, lab.version, {"folder": str(tmp_path)}, config)))
            == lab.version
        )
    else:
        hub = Hub("", torch.device("cpu"), 60.0) if transport == "process_group" else None
        lab.runner.run(lab.send(tensors.items(), adapter=config, sender=hub and hub.sender(1)))
        if hub is not None:
            hub.close()
    requests = [cached, *(lab.request(seed, prompt=seed, temperature=t) for seed, t in enumerate((0.7, 1.0)))]
    for request, answer in zip(requests, lab.ask(*requests), strict=True):
        assert set(answer.versions.tolist()) == {lab.version}
        assert lab.off(model, request, answer) < CLOSE
        assert lab.off(trainer.base, request, answer) > FAR


def test_an_update_in_mid_generation_changes_the_next_token_on(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, trainer = bench
    monkeypatch.setattr(lab.context.chat, "stop_ids", ())
    made = {}

    async def update() -> None:
        model, tensors, config = trainer.adapters(lab.version + 20)
        made[lab.version + 1] = model
        await lab.send(tensors.items(), adapter=config)

    lab.runner.run(update())
    request = lab.request(3, tokens=480, temperature=1.0)
    answer = in_flight(lab, request, update)
    for version in set(answer.versions.tolist()):
        assert lab.off(made[version], request, answer, answer.versions == version) < CLOSE


def test_what_vllm_cannot_adapt_is_one_error_and_the_next_update_serves(bench: Any) -> None:
    lab, trainer = bench
    model, tensors, config = trainer.adapters(5)
    elsewhere = {name.replace("q_proj", "rotary_emb"): tensor for name, tensor in tensors.items()}
    with pytest.raises(
        EngineError,
        match=r"no adapters for rotary_emb\. Known: .*q_proj.* Fix: another lora_target, or lora_sync: merged",
    ) as caught:
        lab.runner.run(lab.send(elsewhere.items(), adapter=config))
    assert "\n" not in str(caught.value)
    nowhere = {name.replace("layers.1.", "layers.7."): tensor for name, tensor in tensors.items()}
    with pytest.raises(EngineError, match=r"vLLM has no adapters for .*layers\.7\..* Fix: another lora_target"):
        lab.runner.run(lab.send(nowhere.items(), adapter=config))
    with pytest.raises(EngineError, match="holds nobody knows which adapters"):
        lab.ask(lab.request())
    lab.runner.run(lab.send(tensors.items(), adapter=config))
    request = lab.request(6)
    (answer,) = lab.ask(request)
    assert lab.off(model, request, answer) < CLOSE


def test_whole_weights_are_refused(bench: Any) -> None:
    lab, _ = bench
    with pytest.raises(EngineError, match="brings whole weights, and vLLM was started for adapters alone"):
        lab.runner.run(lab.backend.receive(Offer("safetensors", 99, {"folder": str(lab.context.model)})))


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["server", "attach"])
def test_a_server_takes_adapters_alone(make_lab: Callable[..., Any], adapted: Callable[..., Any], mode: str) -> None:
    from turnwise_serving.fixtures import started
    from turnwise_vllm.config import VllmConfig
    from turnwise_vllm.process import Server

    lora = Lora(4, 6, sync="adapter")
    options: dict[str, Any] = {"load_format": "auto", "mode": mode}
    process = None
    if mode == "attach":
        from turnwise_vllm.fixtures import KEY, attach, model_context

        process = Server(VllmConfig(mode="server"), evolve(model_context(), lora=lora))
        attach(process)
        options = {
            "mode": mode,
            "base_url": process.url,
            "api_key_env": KEY,
            "load_format": "auto",
            "start_timeout": 200.0,
        }
        started(process)
    try:
        for again in range(2 if mode == "attach" else 1):  # the second run finds the first one's adapters there
            lab = make_lab(options, lora=lora)
            trainer = Trainer(lab.context.model, adapted)
            request = lab.request(1 + again)
            (answer,) = lab.ask(request)
            assert lab.off(trainer.base, request, answer) < CLOSE
            model, tensors, config = trainer.adapters(3 + again)
            lab.version += 5
            lab.runner.run(lab.send(tensors.items(), adapter=config))
            (answer,) = lab.ask(request)
            assert set(answer.versions.tolist()) == {lab.version}
            assert lab.off(model, request, answer) < CLOSE
            elsewhere = {name.replace("q_proj", "rotary_emb"): tensor for name, tensor in tensors.items()}
            with pytest.raises(EngineError, match=r"no adapters for rotary_emb"):
                lab.runner.run(lab.send(elsewhere.items(), adapter=config))
            lab.runner.run(lab.send(tensors.items(), adapter=config))
            if mode == "server":
                engine_dies(lab)
            lab.close()
    finally:
        if process is not None:
            process.stop()


def engine_dies(lab: Any) -> None:
    """The engine's own process ends under the server's: the backend says that it is lost, and goes on saying so."""
    import psutil

    # The server's process has no other name: the backend gives none away.
    children = psutil.Process(lab.backend.engine._process.pid).children(recursive=True)
    (engine,) = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    engine.kill()
    for _ in range(2):
        with pytest.raises(EngineLost, match=r"Its engine died|is gone"):
            lab.ask(lab.request(9, tokens=100))
