"""Whole runs in which Megatron trains while the next batch is played."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.testing.ahead import check_ahead

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "way", ["between_batches", "between_tokens", pytest.param("between_turns", marks=pytest.mark.matrix)]
)
def test_megatron_trains_a_batch_behind_the_sampler_and_goes_on_from_a_checkpoint(tmp_path: Path, way: str) -> None:
    check_ahead(tmp_path, "turnwise-megatron", way=way, actor_train__strategy_args={"strategy_name": "megatron_train"})


@pytest.mark.matrix
def test_so_do_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    check_ahead(
        tmp_path,
        "turnwise-megatron",
        "turnwise-ray",
        runtime={"use": "ray", "device": "cpu", "object_store_mb": 100},
        actor_train__strategy_args={
            "strategy_name": "megatron_train",
            "strategy_config": {"tensor_model_parallel_size": 2},
        },
        actor_train__device_mapping=[0, 1],
        actor_train__training_args__per_device_train_batch_size=2,
        actor_infer__device_mapping=[2],
    )
