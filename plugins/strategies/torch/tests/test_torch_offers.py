"""How weights leave: shared, as a folder on disk, in buckets; and who waits for whom meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from turnwise.data.rows import Update
from turnwise.errors import EngineError, TrainerError
from turnwise_torch import shared
from turnwise_torch.strategy import TorchStrategy
from turnwise_torch.stream import Sender

Build = Callable[..., TorchStrategy]


def test_a_shared_offer_names_the_living_model_until_close(build: Build, update: Update) -> None:
    strategy = build()
    offer = strategy.offer("shared", 3)
    assert (offer.transport, offer.version) == ("shared", 3)
    assert shared.lookup(offer.payload["key"]).model is strategy.model
    assert strategy.offer("shared", 4).payload == offer.payload
    strategy.update(update)
    strategy.send(offer)
    strategy.close()
    strategy.close()
    with pytest.raises(EngineError):
        shared.lookup(offer.payload["key"])


def test_the_step_waits_for_a_sampler_that_holds_the_lock(
    build: Build, update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = build()
    lock = shared.lookup(strategy.offer("shared", 0).payload["key"]).lock
    assert strategy.optimizer is not None
    held: list[bool] = []
    step = strategy.optimizer.step
    monkeypatch.setattr(strategy.optimizer, "step", lambda lr: (held.append(lock.locked()), step(lr)))
    strategy.update(update)
    assert held == [True]
    assert not lock.locked()
    strategy.close()


def test_weights_on_disk_are_a_model_folder_that_the_next_offer_replaces(build: Build, update: Update) -> None:
    strategy = build()
    strategy.update(update)
    first = Path(strategy.offer("safetensors", 1).payload["folder"])
    loaded = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), strategy.model.parameters()))
    second = Path(strategy.offer("safetensors", 2).payload["folder"])
    assert second.is_dir()
    assert not first.exists()
    strategy.close()
    assert not second.exists()


def test_weights_leave_in_buckets_of_their_size_one_made_after_the_other(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = build(bucket_bytes=4096)
    every = {name: weight.nbytes for name, weight in strategy.weights()}
    offer, begun, sent = strategy.offer("shared_memory", 1), [], []
    given = strategy.weights

    def weights_one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in given():
            begun.append(pair[0])
            yield pair

    def send(sender: Sender, made: Iterator[list[tuple[str, torch.Tensor]]]) -> None:
        for bucket in made:
            sent.append([name for name, _ in bucket])
            if len(sent) == 1:
                assert len(begun) < len(every), "the whole model was gathered before the first bucket left"

    monkeypatch.setattr(strategy, "weights", weights_one_by_one)
    monkeypatch.setattr(Sender, "send", send)
    strategy.send(offer)
    assert [name for bucket in sent for name in bucket] == list(every)
    assert len(sent) > 1
    for bucket in sent:
        whole = len({name.split(".")[2] for name in bucket if ".layers." in name}) == 1  # a layer is never split
        assert sum(every[name] for name in bucket) <= 4096 or len(bucket) == 1 or whole


def test_an_unknown_transport_is_reported(build: Build) -> None:
    with pytest.raises(
        TrainerError, match=r"no transport 'nccl'\. It has: shared, shared_memory, process_group, safetensors"
    ):
        build().offer("nccl", 0)
