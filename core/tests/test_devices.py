"""The GPUs of this machine, counted without any engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.devices import visible_gpus


@pytest.mark.parametrize(("value", "count"), [("", 0), ("-1", 0), ("0,1", 2), ("GPU-1234, GPU-5678,", 2)])
def test_visible_devices_are_counted_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == count


def test_without_that_variable_devices_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        Path, "glob", lambda self, pattern: [Path("/dev/nvidia0"), Path("/dev/nvidia12"), Path("/dev/nvidiactl")]
    )
    assert visible_gpus() == 2
