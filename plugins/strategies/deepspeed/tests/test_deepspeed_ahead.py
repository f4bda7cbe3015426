"""Whole runs in which DeepSpeed trains while the next batch is played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnwise.testing.ahead import check_ahead

pytest.importorskip("deepspeed", reason="deepspeed is not installed (pip install 'turnwise-deepspeed[deepspeed]')")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def zero(stage: int) -> dict[str, Any]:
    block: dict[str, Any] = {"stage": stage}
    if stage == 3:
        block["stage3_param_persistence_threshold"] = 0
    return {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": block}}


@pytest.mark.parametrize(
    ("stage", "way"),
    [
        (1, "between_batches"),
        (3, "between_tokens"),
        pytest.param(3, "between_batches", marks=pytest.mark.matrix),
        pytest.param(3, "between_turns", marks=pytest.mark.matrix),
        pytest.param(1, "between_turns", marks=pytest.mark.matrix),
        pytest.param(1, "between_tokens", marks=pytest.mark.matrix),
    ],
)
def test_deepspeed_trains_a_batch_behind_the_sampler_and_goes_on_from_a_checkpoint(
    tmp_path: Path, stage: int, way: str
) -> None:
    check_ahead(tmp_path, "turnwise-deepspeed", way=way, actor_train__strategy_args=zero(stage))


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 3])
def test_so_do_two_ranks(tmp_path: Path, stage: int) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    check_ahead(
        tmp_path,
        "turnwise-deepspeed",
        "turnwise-ray",
        runtime={"use": "ray", "device": "cpu", "object_store_mb": 100},
        actor_train__strategy_args=zero(stage),
        actor_train__device_mapping=[0, 1],
        actor_train__training_args__per_device_train_batch_size=2,
        actor_infer__device_mapping=[2],
    )
