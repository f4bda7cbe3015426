"""Which device a training process works on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from turnwise.contracts.train import TrainContext
from turnwise_torch.device import device_of


def test_the_gpu_of_a_role_is_the_current_one_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given no device, kernels and NCCL among it, would work on GPU 0, which may be another role's."""
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert device_of(TrainContext(model=Path(), role="actor_train", devices=(1,))) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    assert device_of(TrainContext(model=Path(), role="actor_train")) == torch.device("cpu")
    assert len(chosen) == 1
