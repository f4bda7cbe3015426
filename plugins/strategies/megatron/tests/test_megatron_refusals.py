"""What Megatron or this strategy cannot do is refused in one line each, before anything is loaded where that can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.contracts.train import Lora, Ranks
from turnwise.data.rows import Rows
from turnwise.errors import CheckpointError, ConfigError, TrainerError
from turnwise.testing.compare import says
from turnwise_megatron.config import MegatronConfig
from turnwise_megatron.strategy import MegatronStrategy
from turnwise_torch.testing import picture_rows

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings(r"ignore::Warning:megatron\.core"),
    pytest.mark.filterwarnings(r"ignore:`torch\.distributed\.\w+` is deprecated:FutureWarning"),
]


def test_sizes_that_the_experts_do_not_allow_are_refused_in_one_line_each(
    lab: Any, tmp_path: Path, qwen2: Path
) -> None:
    def lines(model: Path, size: int, **config: Any) -> list[str]:
        found = [
            str(problem)
            for problem in MegatronStrategy.check(MegatronConfig(**config), lab.context_of(model, ranks=Ranks(0, size)))
        ]
        return [line.removesuffix(f" ({model})") for line in found]

    folder = lab.make_model(tmp_path / "model", "qwen3_moe", False)
    assert lines(folder, 2, expert_model_parallel_size=2) == []
    (line,) = lines(folder, 3, expert_model_parallel_size=3)
    says(line, "expert_model_parallel_size: 3", "does not divide the 4 experts")
    (line,) = lines(folder, 2, tensor_model_parallel_size=2)
    says(line, "tensor_model_parallel_size: 2", "experts needs sequence parallelism", "Fix: sequence_parallel: true")
    tensor = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert lines(folder, 2, **tensor) == []
    (line,) = lines(folder, 2, **tensor, expert_tensor_parallel_size=1)
    says(line, "expert_tensor_parallel_size: 1", "needs an expert_model_parallel_size over 1", "Fix: remove it")
    (line,) = lines(qwen2, 2, **tensor, expert_tensor_parallel_size=2)
    says(line, "expert_tensor_parallel_size: 2", "qwen2 has no experts", "Fix: remove it")
    odd = lab.make_model(tmp_path / "odd", "qwen3_moe", False, moe_intermediate_size=15, num_experts_per_tok=1)
    conversion, size = lines(odd, 2, **tensor)
    says(conversion, "qwen3_moe", "num_experts_per_tok: 1", "norm_topk_prob: true", "Fix: strategy_name: torch")
    says(size, "tensor_model_parallel_size: 2", "does not divide moe_intermediate_size 15")
    (line,) = map(
        str, MegatronStrategy.check(MegatronConfig(engine_args={"moe_aux_loss_coeff": 0.01}), lab.context_of(folder))
    )
    assert line.endswith(
        "moe_aux_loss_coeff: it is Megatron's, and strategy megatron does not support it. Fix: remove it"
    )


def test_another_architecture_is_refused_by_name_before_anything_loads(lab: Any, tmp_path: Path, qwen2: Path) -> None:
    facts = json.loads((qwen2 / "config.json").read_text())
    for change, text in [
        ({"model_type": "qwen2_5_vl"}, "no conversion for 'qwen2_5_vl'"),
        ({"model_type": "gemma3"}, "no conversion for 'gemma3'"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None},
            "use_sliding_window: True",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_parameters"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**facts, **change}))
        with pytest.raises(ConfigError, match=text) as caught:
            MegatronStrategy(MegatronConfig(), lab.context_of(tmp_path))
        assert all("\n" not in line and "Fix:" in line for line in caught.value.problems)


def test_images_and_foreign_ids_are_refused(build: Any) -> None:
    strategy = build(trainable=False, objective=None)
    with pytest.raises(TrainerError, match="received images"):
        strategy.logprobs(picture_rows())
    with pytest.raises(TrainerError, match="received the token id 51, its model has ids 0 to 50"):
        strategy.logprobs(Rows(np.array([1, 51], np.int32), np.array([0, 2]), np.array([False, True])))
    assert strategy.logprobs(Rows(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, bool))).shape == (0,)


def test_arguments_of_the_engine_are_compared_with_megatrons_own(lab: Any, qwen2: Path) -> None:
    def lines(**given: Any) -> list[str]:
        return [
            str(problem) for problem in MegatronStrategy.check(MegatronConfig(engine_args=given), lab.context_of(qwen2))
        ]

    assert lines(attention_softmax_in_fp32=True, attention_softmax_in_fp23=1)[0].endswith(
        "Megatron has no such argument. Did you mean 'attention_softmax_in_fp32'? Fix: a field of TransformerConfig or"
        " OptimizerConfig"
    )
    assert lines(distribute_saved_activations=False, overlap_grad_reduce=True, log_num_zeros_in_grad=False) == []
    (line,) = lines(weight_decay=0.1)
    says(line, "$.actor_train.strategy_args.strategy_config.weight_decay", "training_args", "Fix: remove it")
    (line,) = lines(virtual_pipeline_model_parallel_size=2)
    assert "does not support it" in line


def test_arguments_of_the_engine_reach_it_and_its_refusals_are_one_line(build: Any) -> None:
    strategy = build(MegatronConfig(engine_args={"softmax_scale": 0.5, "log_num_zeros_in_grad": True}))
    assert strategy.model.config.softmax_scale == 0.5
    assert strategy.optimizer.megatron.config.log_num_zeros_in_grad
    with pytest.raises(ConfigError, match="Megatron refuses the configuration: ") as caught:
        build(
            MegatronConfig(
                recompute_granularity="selective",
                recompute_method="uniform",
                engine_args={"recompute_modules": ["nothing"]},
            )
        )
    assert "\n" not in str(caught.value)


def test_what_this_strategy_does_not_do_is_refused_in_one_line_each(lab: Any, qwen2: Path) -> None:
    context = lab.context_of(
        qwen2,
        dtype="fp16",
        use_sequence_packing=True,
        lora=Lora(8, 16),
        frozen=("model.embed_tokens",),
        ranks=Ranks(0, 3),
        temperature=0.0,
    )
    lines = [str(problem) for problem in MegatronStrategy.check(MegatronConfig(tensor_model_parallel_size=2), context)]
    for text in (
        "3 devices are not divisible",
        "fp16",
        "does not pack",
        "LoRA",
        "cannot freeze model.embed_tokens",
        "temperature",
    ):
        assert len([line for line in lines if text in line]) == 1, text
    (line,) = map(
        str,
        MegatronStrategy.check(
            MegatronConfig(pipeline_model_parallel_size=3), lab.context_of(qwen2, ranks=Ranks(0, 3))
        ),
    )
    assert "does not divide the 2 layers" in line
    (line,) = map(
        str,
        MegatronStrategy.check(MegatronConfig(expert_model_parallel_size=2), lab.context_of(qwen2, ranks=Ranks(0, 2))),
    )
    assert "qwen2 has no experts" in line


def test_a_state_of_another_run_or_a_damaged_one_is_refused(build: Any, tmp_path: Path) -> None:
    strategy = build()
    with pytest.raises(CheckpointError, match="no training state of strategy megatron"):
        strategy.load(tmp_path)
    strategy.save(tmp_path)
    with pytest.raises(
        CheckpointError,
        match="is of the layout tensor 1, pipeline 1, context 1, data 1, distributed optimizer, this run has",
    ):
        build(MegatronConfig(use_distributed_optimizer=False)).load(tmp_path)
    with pytest.raises(CheckpointError, match="was saved with dtype 'fp32'"):
        build(dtype="bf16").load(tmp_path)
    file = tmp_path / "rank-00000" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        strategy.load(tmp_path)
