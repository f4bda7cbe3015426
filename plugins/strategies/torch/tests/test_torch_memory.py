"""Memory that does not do: one line with the phase, the role and the keys, in whatever the strategy does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from turnwise.data.rows import Update
from turnwise.errors import EngineError, OutOfMemory, TrainerError
from turnwise_torch import models
from turnwise_torch.broadcast import Broadcast, Member
from turnwise_torch.guard import Savings, out_of_memory_named
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.stream import Sender, receive

Build = Callable[..., TorchStrategy]


def exhausted(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_running_out_of_memory_names_phase_role_and_keys(
    build: Build, update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = build()
    monkeypatch.setattr(strategy.model.base_model, "forward", exhausted)
    with pytest.raises(
        TrainerError,
        match=r"out of memory, in the update of actor_train\. Fix: lower actor_train\.training_args\.per_device",
    ):
        strategy.update(update)
    with pytest.raises(
        TrainerError, match=r"out of memory, in log-probs of actor_train\. Fix: lower actor_train\.infer_batch_size"
    ):
        strategy.logprobs(update.rows)


SPREAD = r"fsdp: \{cpu_offload: true\} in actor_train\.strategy_args\.strategy_config"
SENDING = rf"lower model_update_buffer_size_mb, or what the sampler keeps .* or set {SPREAD}"
HOLDING = rf"more devices in actor_train\.device_mapping, or set {SPREAD}"
MOVING = rf"devices of its own in actor_train\.device_mapping, .* or set {SPREAD}"


@pytest.mark.parametrize(
    ("place", "act", "expected"),
    [
        ("weights", lambda s, f: s.export(f), f"the export of actor_train. Fix: {HOLDING}"),
        (
            "weights",
            lambda s, f: s.send(s.offer("shared_memory", 1)),
            f"the sending of weights of actor_train. Fix: {SENDING}",
        ),
        (
            "sending.new_sender",
            lambda s, f: s.offer("process_group", 1),
            f"the offer of weights of actor_train. Fix: {SENDING}",
        ),
        ("model.to", lambda s, f: s.offload(), f"offloading of actor_train. Fix: {MOVING}"),
        ("optimizer.move", lambda s, f: s.onload(), f"onloading of actor_train. Fix: {MOVING}"),
        ("optimizer.state", lambda s, f: s.save(f), f"the checkpoint of actor_train. Fix: {HOLDING}"),
        ("optimizer.restore", lambda s, f: (s.save(f), s.load(f)), f"resuming of actor_train. Fix: {HOLDING}"),
    ],
)
def test_running_out_of_memory_beside_the_model_names_phase_role_and_keys(
    build: Build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    act: Callable[[TorchStrategy, Path], Any],
    expected: str,
) -> None:
    strategy = build(weight_sync_timeout=5.0)
    if "sending" in expected:
        monkeypatch.setattr(Sender, "send", lambda self, buckets: list(buckets))
    *owner, name = place.split(".")
    monkeypatch.setattr(attrgetter(*owner)(strategy) if owner else strategy, name, exhausted)
    with pytest.raises(OutOfMemory, match=f"^out of memory, in {expected}") as caught:
        act(strategy, tmp_path / "there")
    assert "\n" not in str(caught.value)
    strategy.close()


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_bucket_that_does_not_fit_is_no_backend_that_stopped_reading(
    build: Build, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    strategy = build(weight_sync_timeout=20.0)
    way = receive if transport == "shared_memory" else Member(torch.device("cpu")).receive
    monkeypatch.setattr(
        Sender if transport == "shared_memory" else Broadcast,
        "_write" if transport == "shared_memory" else "_pass",
        exhausted,
    )
    offer = strategy.offer(transport, 1)
    seen: list[str] = []

    def read() -> None:
        try:
            list(way(offer.payload, 20))
        except EngineError as error:
            seen.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.raises(
        OutOfMemory,
        match=r"^out of memory, in the sending of weights of actor_train\. Fix: lower model_update_buffer_size_mb",
    ):
        strategy.send(offer)
    reader.join(30)
    strategy.close()
    assert seen[0].startswith("weight update: the trainer stopped sending")


def test_loading_without_memory_is_no_damaged_folder(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", exhausted)
    with pytest.raises(OutOfMemory, match=rf"^out of memory, in loading the model of actor_train\. Fix: {HOLDING}"):
        build()


def test_the_cpus_allocator_is_recognised_and_other_errors_pass() -> None:
    with (
        pytest.raises(OutOfMemory, match="out of memory, in values of critic"),
        out_of_memory_named("values", "critic", "infer", Savings("", "")),
    ):
        torch.empty(1 << 55)
    with pytest.raises(RuntimeError, match="shape"), out_of_memory_named("values", "critic", "infer", Savings("", "")):
        raise RuntimeError("shape")
