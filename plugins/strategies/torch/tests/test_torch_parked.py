"""Memory given back: beneath tensors that stay, straight to main memory, and out of torch's own keeping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from turnwise_torch.parked import Parked
from turnwise_torch.strategy import TorchStrategy


def test_memory_that_is_given_back_comes_back_with_views_intact() -> None:
    whole, gradient = torch.arange(12.0), torch.ones(3)
    part = whole[4:8]
    parked = Parked([whole, part], [gradient])
    assert whole.untyped_storage().nbytes() == gradient.untyped_storage().nbytes() == 0
    parked.back()
    part += 100
    assert whole.tolist() == [0, 1, 2, 3, 104, 105, 106, 107, 8, 9, 10, 11]
    assert gradient.tolist() == [0, 0, 0]


def test_nothing_is_copied_on_the_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(storage: torch.UntypedStorage) -> None:
        raise AssertionError("a second copy where there may be no room for one")

    monkeypatch.setattr(torch.UntypedStorage, "clone", copied)
    weight = torch.arange(4.0)
    Parked([weight]).back()
    assert weight.tolist() == [0, 1, 2, 3]


def test_offloading_gives_back_what_torch_keeps_after_everything_has_left(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy: TorchStrategy = build(dtype="bf16")
    assert strategy.optimizer is not None
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("given back"))
    monkeypatch.setattr(strategy.model, "to", lambda device: done.append(f"model to {device}"))
    monkeypatch.setattr(strategy.optimizer, "move", lambda device: done.append(f"optimizer to {device}"))
    strategy.device = torch.device("cuda", 0)
    strategy.offload()
    assert done == ["model to cpu", "optimizer to cpu", "given back"]
    strategy.onload()
    assert done[3:] == ["model to cuda:0", "optimizer to cuda:0"]
