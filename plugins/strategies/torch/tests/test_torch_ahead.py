"""Whole runs in which two ranks that share a model by FSDP2 train while the next batch is played."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.testing.ahead import check_ahead

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def test_a_sharded_trainer_trains_a_batch_behind_the_sampler_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    check_ahead(
        tmp_path,
        "turnwise-ray",
        runtime={"use": "ray", "device": "cpu", "object_store_mb": 100},
        actor_train__device_mapping=[0, 1],
        actor_train__training_args__per_device_train_batch_size=2,
        actor_infer__device_mapping=[2],
    )
