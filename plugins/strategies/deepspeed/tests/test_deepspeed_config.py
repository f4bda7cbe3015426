"""The options of DeepSpeed: stages, offload, presets, bytes by hand, and the refusal to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnwise.config.convert import structure
from turnwise.contracts.train import TrainContext
from turnwise.errors import ConfigError
from turnwise_deepspeed import train_strategies
from turnwise_deepspeed.config import DeepspeedConfig
from turnwise_deepspeed.strategy import DeepspeedStrategy

FACTS = {"parameters": 1000, "dtype": "bf16", "world": 8}


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(0, 2000, 2000, 12000), (1, 2000, 2000, 1500), (2, 2000, 250, 1500), (3, 250, 250, 1500)],
)
def test_each_stage_shards_one_thing_more(stage: int, weights: int, gradients: int, optimizer: int) -> None:
    expected = {"weights": weights, "gradients": gradients, "optimizer": optimizer, "cpu": 0}
    assert DeepspeedConfig(stage=stage).memory(FACTS) == expected
    assert DeepspeedConfig(zero_optimization={"stage": stage}).memory(FACTS) == expected


def test_a_reference_holds_weights_alone() -> None:
    assert DeepspeedConfig(stage=3).memory({**FACTS, "trainable": False}) == {"weights": 250, "gradients": 0, "optimizer": 0, "cpu": 0}


def test_what_is_offloaded_is_main_memory() -> None:
    (record,) = train_strategies()
    config, problems = structure(DeepspeedConfig, record.presets["deepspeed_zero3_cpuoffload"])
    assert problems == []
    assert config is not None
    assert config.memory(FACTS) == {"weights": 0, "gradients": 0, "optimizer": 0, "cpu": 250 + 250 + 1500}
    nothing = {"stage": 3, "offload_optimizer": {"device": "none"}}
    assert DeepspeedConfig(zero_optimization=nothing).memory(FACTS)["cpu"] == 0


def test_the_presets_are_the_field_s() -> None:
    (record,) = train_strategies()
    stages = {}
    for name, options in record.presets.items():
        config, problems = structure(DeepspeedConfig, options)
        assert problems == [] and config is not None
        stages[name] = config.zero_stage
    assert stages == {"deepspeed_zero": 0, "deepspeed_zero2": 2, "deepspeed_zero3": 3, "deepspeed_zero3_cpuoffload": 3}
    assert record.requires == ("deepspeed",)
    assert record.aliases == ("deepspeed_train", "deepspeed_infer")


def test_every_device_has_rows_of_its_own() -> None:
    assert DeepspeedConfig(stage=3).data_parallel_size(8) == 8


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 4},
        {"zero_optimization": {"stage": 5}},
        {"stage": 2, "zero_optimization": {"stage": 3}},
        {"zero_optimization": {"offload_param": "cpu"}},
    ],
)
def test_what_deepspeed_does_not_know_is_refused(options: dict[str, Any]) -> None:
    assert structure(DeepspeedConfig, options)[1]


def test_it_refuses_to_run_in_one_line() -> None:
    context = TrainContext(model=Path("m"), role="actor_train")
    (line,) = DeepspeedStrategy.check(DeepspeedConfig(), context)
    assert line.startswith("strategy deepspeed cannot run in this version, it plans only. Fix: ")
    with pytest.raises(ConfigError, match="plans only"):
        DeepspeedStrategy(DeepspeedConfig(), context)
