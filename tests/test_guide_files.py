"""The two YAMLs of ROLL's guide to asynchronous training, agentic and single-turn: every line of them is read, and both
run on CPUs with a tiny model, on Ray, with the engines that they name."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import load
from turnwise.config.schema import RunConfig

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
AGENTIC, SINGLE_TURN = "agent_megatron_async.yaml", "rlvr_megatron_async.yaml"
BESIDE = {
    AGENTIC: ["reward_pretrain=${pretrain}", "async_generation_ratio=1.0"],
    SINGLE_TURN: [
        "reward_pretrain=${pretrain}",
        "actor_train.data_args={template: qwen2_5, file_name: [data/math_deepmath_deal.jsonl]}",
        "actor_train.infer_batch_size=2",
        "actor_infer.infer_batch_size=1",
        "actor_infer.generating_args.num_return_sequences=${num_return_sequences_in_group}",
        "reference=null",
    ],
}
"""Lines of the guide that the set-ups of `examples` have not, or otherwise."""


def planned(name: str) -> RunConfig:
    return load(EXAMPLES / name, BESIDE[name], planning=True).config


def test_the_agentic_file_is_read_line_by_line() -> None:
    config = planned(AGENTIC)
    assert (config.async_generation_ratio, config.weight_update) == (1, "between_batches")
    assert (config.rollout_batch_size, config.val_batch_size, config.sequence_length) == (1024, 1024, 8192)
    assert (config.max_steps, config.save_steps, config.logging_steps, config.eval_steps) == (1024, 10000, 1, 10)
    assert (config.ppo_epochs, config.adv_estimator.name, config.whiten_advantages) == (1, "grpo", True)
    train, infer = config.actor_train, config.actor_infer
    assert (train.device_mapping, infer.device_mapping) == ((0, 1, 2, 3), (4, 5, 6, 7))
    args = train.training_args
    assert (args.learning_rate, args.weight_decay, args.warmup_steps) == (1e-6, 0, 10)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps, train.infer_batch_size) == (2, 128, 2)
    assert train.strategy_args is not None and infer.strategy_args is not None
    assert (train.strategy_args.name, infer.strategy_args.name) == ("megatron", "vllm")
    sampled = infer.generating_args
    assert (sampled.max_new_tokens, sampled.top_p, sampled.top_k, sampled.temperature) == (128, 0.99, 100, 0.99)
    options = infer.strategy_args.config
    assert (options.gpu_memory_utilization, options.block_size, options.load_format) == (0.8, 16, "auto")


def test_the_single_turn_file_is_read_line_by_line() -> None:
    config = planned(SINGLE_TURN)
    assert (config.async_generation_ratio, config.sequence_length) == (1, 2048 + 8192)
    # 64 prompts of eight responses each, whichever of its two keys says eight.
    assert (config.rollout_batch_size, config.train_env_manager.num_env_groups) == (512, 64)
    assert config.train_env_manager.group_size == 8
    assert (config.max_steps, config.save_steps, config.logging_steps, config.eval_steps) == (1000, 100, 1, 0)
    assert (config.ppo_epochs, config.adv_estimator.name) == (1, "reinforce")
    train, infer = config.actor_train, config.actor_infer
    assert (train.device_mapping, infer.device_mapping) == (tuple(range(16)), tuple(range(16, 24)))
    assert (train.model_args.dtype, infer.model_args.dtype) == ("bf16", "fp16")
    assert (train.infer_batch_size, infer.infer_batch_size, infer.generating_args.max_new_tokens) == (2, 1, 8192)
    args = train.training_args
    assert (args.learning_rate, args.per_device_train_batch_size, args.gradient_accumulation_steps) == (1e-6, 1, 64)
    assert train.strategy_args is not None and infer.strategy_args is not None
    assert (train.strategy_args.name, infer.strategy_args.name) == ("megatron", "sglang")
    assert train.strategy_args.config.tensor_model_parallel_size == 2
    options = infer.strategy_args.config
    assert (options.mem_fraction_static, options.load_format) == (0.85, "dummy")


# Two heads of 32: vLLM's attention on CPUs has no smaller ones.
MODEL = "pretrain={recipe: {architecture: qwen2, num_layers: 2, hidden_size: 64, num_heads: 2, tokenizer: word}}"
CPU = "runtime={use: ray, device: cpu, object_store_mb: 100}"
SHORT = ["max_steps=3", "output_dir=out", "logging_dir=null", "track_with=[{use: jsonl, every: 1}]"]
SHRUNK = {
    AGENTIC: [
        *("actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]", "reference.device_mapping=[0]"),
        *("rollout_batch_size=8", "train_env_manager.num_env_groups=2", "train_env_manager.group_size=4"),
        "train_env_manager.num_groups_partition=[2]",
        *("val_batch_size=2", "val_env_manager.num_env_groups=2", "val_env_manager.num_groups_partition=[2]"),
        *("sequence_length=1024", "max_actions_per_traj=2", "max_tokens_per_step=8", "eval_steps=2"),
        "actor_train.training_args.gradient_accumulation_steps=4",
        "actor_train.training_args.warmup_steps=1",
    ],
    SINGLE_TURN: [
        f"custom_envs.DeepMath.env_config.data={EXAMPLES / 'data' / 'deepmath.jsonl'}",
        # The rule of the file asks for a package that the engines' environment has not.
        "custom_envs.DeepMath.env_config.rewards=exact",
        *("actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[2]", "reference.device_mapping=[0,1]"),
        *("rollout_batch_size=4", "num_return_sequences_in_group=2", "prompt_length=500", "response_length=8"),
        "actor_train.training_args.gradient_accumulation_steps=8",
    ],
}
"""What a machine with two processors and some gigabytes holds of them: one process for a role, or two."""


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [AGENTIC, pytest.param(SINGLE_TURN, marks=pytest.mark.matrix)])
def test_the_files_run_on_cpus_with_their_own_engines(tmp_path: Path, name: str) -> None:
    python = os.environ.get("TURNWISE_SGLANG_PYTHON", "")
    if importlib.util.find_spec("vllm") is None or (name == SINGLE_TURN and not python):
        pytest.skip("the engines are not installed here")
    python_of_sglang = [f"actor_infer.strategy_args.strategy_config.python={python}"] * (name == SINGLE_TURN)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "turnwise.cli.main",
            "train",
            EXAMPLES / name,
            MODEL,
            CPU,
            *SHORT,
            *SHRUNK[name],
            *python_of_sglang,
        ],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    trained = [line for line in lines if "async/staleness/max" in line]
    assert [line["step"] for line in trained] == [0, 1, 2]
    # The first batch is played with the first weights, and each later one while the step before it trains.
    assert [line["async/staleness/max"] for line in trained] == [0, 1, 1]
    assert {line["async/version_span"] for line in trained} == {0}
    assert all(line["policy/updates"] == 1 and line["async/ess"] > 0.9 for line in trained)
    assert (tmp_path / "out" / "checkpoints" / "checkpoint-000003" / "model" / "config.json").is_file()
    if name == AGENTIC:
        assert [line["step"] for line in lines if "val/score/mean" in line] == [0, 2, 3]
