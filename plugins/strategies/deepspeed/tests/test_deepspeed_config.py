"""The options of DeepSpeed: stages, offload, presets, bytes by hand, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, fields

from turnwise.config.convert import structure
from turnwise.contracts.train import LossChoice, Objective, TrainContext
from turnwise_deepspeed import train_strategies
from turnwise_deepspeed.arguments import engine_config, problems
from turnwise_deepspeed.config import DeepspeedConfig

FACTS = {"parameters": 1000, "dtype": "bf16", "world": 8}


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(0, 2000, 2000, 12000), (1, 2000, 6000, 1500), (2, 2000, 500, 1500), (3, 250, 500, 1500)],
)
def test_each_stage_shards_one_thing_more(stage: int, weights: int, gradients: int, optimizer: int) -> None:
    expected = {"weights": weights, "gradients": gradients, "optimizer": optimizer, "cpu": 0}
    assert DeepspeedConfig(stage=stage).memory(FACTS) == expected
    assert DeepspeedConfig(zero_optimization={"stage": stage}).memory(FACTS) == expected


@pytest.mark.parametrize(("stage", "gradients"), [(0, 4000), (1, 4000), (2, 500), (3, 500)])
def test_gradients_of_a_32_bit_model_are_their_own_sums(stage: int, gradients: int) -> None:
    assert DeepspeedConfig(stage=stage).memory({**FACTS, "dtype": "fp32"})["gradients"] == gradients


def test_a_reference_holds_weights_alone() -> None:
    assert DeepspeedConfig(stage=3).memory({**FACTS, "trainable": False}) == {
        "weights": 250,
        "gradients": 0,
        "optimizer": 0,
        "cpu": 0,
    }


def test_what_is_offloaded_is_main_memory() -> None:
    (record,) = train_strategies()
    config, problems = structure(DeepspeedConfig, record.presets["deepspeed_zero3_cpuoffload"])
    assert problems == []
    assert config is not None
    assert config.memory(FACTS) == {"weights": 0, "gradients": 0, "optimizer": 0, "cpu": 250 + 500 + 1500}
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
    assert record.requires == ("torch", "transformers", "deepspeed")
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


CONTEXT = TrainContext(model=Path("m"), role="actor_train", objective=Objective(LossChoice("ppo")), max_grad_norm=0.5)
WHERE = "$.actor_train.strategy_args.strategy_config"


def config_of(options: dict[str, Any]) -> DeepspeedConfig:
    """As the configuration's reader makes it: what has no field is collected in `engine_args`."""
    known = {field.name for field in fields(DeepspeedConfig)}
    rest = {name: value for name, value in options.items() if name not in known}
    own = {name: value for name, value in options.items() if name in known}
    config, found = structure(DeepspeedConfig, {**own, "engine_args": own.get("engine_args", rest)})
    assert found == []
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"train_batch_size": 64},
            ".train_batch_size: set by the run. Fix: leave it out, and set rollout_batch_size and ",
        ),
        (
            {"gradient_accumulation_steps": 4},
            ".gradient_accumulation_steps: set by the run. Fix: leave it out, and set training_args.",
        ),
        (
            {"optimizer": {"type": "AdamW"}},
            ".optimizer: set by the run. Fix: leave it out, and set training_args.learning_rate",
        ),
        (
            {"scheduler": {"type": "WarmupLR"}},
            ".scheduler: set by the run. Fix: leave it out, and set training_args.lr_scheduler_type",
        ),
        ({"bf16": {"enabled": True}}, ".bf16: set by the run. Fix: leave it out, and set model_args.dtype"),
        (
            {"engine_args": {"zero_optimization": {"stage": 3}}},
            ".engine_args.zero_optimization: has a key of its own. Fix: zero_optimization beside",
        ),
        (
            {"managed_gradient_accumulation": True},
            ".managed_gradient_accumulation: always false here, got true. Fix: leave it out",
        ),
        ({"tensor_parallel": {"autotp_size": 2}}, ".tensor_parallel: this strategy shards by ZeRO alone. Fix: "),
        (
            {"stage": 2, "zero_optimization": {"offload_param": {"device": "cpu"}}},
            ".zero_optimization.offload_param: only stage 3 offloads weights",
        ),
        (
            {"stage": 0, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            ".zero_optimization.offload_optimizer: stage 0 has no sharded optimizer",
        ),
        (
            {"stage": 1, "zero_optimization": {"overlap_comm": True}},
            ".zero_optimization.overlap_comm: not at stage 1, where the number",
        ),
        (
            {"stage": 2, "zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
            ".zero_optimization.zenflow: it steps with gradients of earlier updates",
        ),
        (
            {"stage": 2, "zero_force_ds_cpu_optimizer": True},
            ".zero_force_ds_cpu_optimizer: DeepSpeedCPUAdam steps an optimizer that is offloaded. ",
        ),
    ],
)
def test_what_is_the_run_s_to_set_is_refused_in_one_line(options: dict[str, Any], line: str) -> None:
    first, *_ = map(str, problems(config_of(options), CONTEXT))
    assert first.startswith(WHERE + line)
    assert "\n" not in first


def test_the_field_s_configurations_leave_to_the_run_what_they_call_auto() -> None:
    zero = {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "offload_param": None,
        "stage3_param_persistence_threshold": "auto",
    }
    left = {"train_batch_size": "auto", "gradient_clipping": "auto", "zero_allow_untested_optimizer": True}
    config = config_of(
        {"zero_optimization": zero, **left, "fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"}}
    )
    assert problems(config, CONTEXT) == []
    made = engine_config(config, CONTEXT)
    assert made["zero_optimization"] == {"stage": 3, "overlap_comm": True}
    assert (made["gradient_clipping"], made["bf16"]) == (0.5, {"enabled": True})
    assert not {"train_batch_size", "fp16"} & set(made)


@pytest.mark.parametrize(("stage", "overlap"), [(0, False), (1, False), (2, None), (3, False)])
def test_micro_batches_vary_and_the_ranks_sum_in_fp32(stage: int, overlap: bool | None) -> None:
    made = engine_config(DeepspeedConfig(stage=stage), CONTEXT)
    assert made["managed_gradient_accumulation"] is False
    assert made["zero_optimization"].get("overlap_comm") is overlap
    assert made.get("data_types") == (None if stage == 0 else {"grad_accum_dtype": "fp32"})
    assert "bf16" not in engine_config(DeepspeedConfig(stage=stage), evolve(CONTEXT, dtype="fp32"))


@pytest.mark.parametrize("options", [{"betas": [0.9]}, {"betas": [0.9, 1.0]}, {"eps": 0.0}, {"logits_chunk": -1}])
def test_an_optimizer_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    assert structure(DeepspeedConfig, options)[1]


@pytest.mark.engines
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"steps_per_prnt": 5}, ": DeepSpeed has no option 'steps_per_prnt'. Did you mean 'steps_per_print'?"),
        ({"beta": [0.9, 0.95]}, ": DeepSpeed has no option 'beta'. Did you mean 'betas'?"),
        (
            {"stage": 3, "zero_optimization": {"stage3_param_persistence_treshold": 1}},
            (
                ".zero_optimization: DeepSpeed has no option 'stage3_param_persistence_treshold'. Did you mean"
                " 'stage3_param_persistence_threshold'?"
            ),
        ),
        (
            {"stage": 3, "zero_optimization": {"offload_param": {"device": "cpu", "pin_memry": True}}},
            ".zero_optimization.offload_param: DeepSpeed has no option 'pin_memry'. Did you mean 'pin_memory'?",
        ),
        (
            {"stage": 3, "zero_optimization": {"sub_group_size": "large"}},
            ".zero_optimization.sub_group_size: Input should be a valid integer",
        ),
        ({"amp": {"enabled": True}}, ": DeepSpeed refuses it: NVIDIA Apex AMP integration has been removed."),
        ({"communication_data_type": "fp8"}, ": DeepSpeed refuses it: Invalid communication_data_type."),
    ],
)
def test_names_and_values_are_compared_with_deepspeed_s_own(options: dict[str, Any], line: str) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed (pip install 'turnwise-deepspeed[deepspeed]')")
    (found,) = map(str, problems(config_of(options), CONTEXT))
    assert found.startswith(WHERE + line)
    assert "\n" not in found


@pytest.mark.engines
def test_what_deepspeed_knows_passes() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed (pip install 'turnwise-deepspeed[deepspeed]')")
    known = {
        "steps_per_print": 5,
        "wall_clock_breakdown": False,
        "communication_data_type": "fp32",
        "prescale_gradients": False,
    }
    zero = {
        "reduce_bucket_size": 1000,
        "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": 10,
        "sub_group_size": 1000000,
    }
    assert problems(config_of({"stage": 3, "zero_optimization": zero, **known}), CONTEXT) == []
    for options in train_strategies()[0].presets.values():
        assert problems(config_of(options), CONTEXT) == []


def test_roles_are_checked_as_those_of_plain_torch() -> None:
    strategy = pytest.importorskip("turnwise_deepspeed.strategy").DeepspeedStrategy
    (line,) = map(str, strategy.check(DeepspeedConfig(), evolve(CONTEXT, dtype="fp16")))
    assert line.startswith("$.actor_train.model_args.dtype: fp16 cannot be trained by strategy deepspeed")


def test_without_a_stage_gradients_are_summed_in_fp32_which_takes_stage_2() -> None:
    assert DeepspeedConfig().zero_stage == 2
    assert DeepspeedConfig(zero_optimization={"overlap_comm": False}).zero_stage == 2
    assert DeepspeedConfig(stage=0).zero_stage == DeepspeedConfig(zero_optimization={"stage": 0}).zero_stage == 0
