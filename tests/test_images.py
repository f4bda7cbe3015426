"""A vision-language model plays and learns in an environment that shows pictures, by both managers, from the command
line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from turnwise.cli.main import main

RUN = """
plugins: [turnwise.testing.plugin, turnwise-managers, turnwise-hf, turnwise-torch, turnwise-grpo, turnwise-losses, turnwise-batching]
output_dir: run
seed: 1  # a model of few words may write the tokens of an image by chance, and then an episode fails
pretrain: {recipe: {architecture: qwen2_5_vl, hidden_size: 32, num_heads: 4, initializer_range: 0.1}}
max_steps: 2
rollout_batch_size: 8
sequence_length: 128
recompute_old_logprobs: "true"
actor_train:
  model_args: {dtype: fp32}
  training_args: {learning_rate: 1.0e-3, per_device_train_batch_size: 2, gradient_accumulation_steps: 2}
  strategy_args: {strategy_name: torch}
actor_infer:
  model_args: {dtype: fp32}
  generating_args: {max_new_tokens: 4, temperature: 0.9}
  strategy_args: {strategy_name: hf}
train_env_manager: {num_env_groups: 2, group_size: 4, tags: [Lamp]}
custom_envs:
  Lamp:
    env_type: fake_lamp
    env_config: {height: 56, width: 56, turns: 3}
    env_manager: {use: MANAGER, action_pattern: (.*)}
    max_steps: 3
    step: inline
track_with: [jsonl]
"""


@pytest.mark.parametrize("manager", ["stepwise", "trajectory"])
def test_a_run_on_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN.replace("MANAGER", manager))
    done = CliRunner().invoke(main, ["train", "run.yaml"])
    assert done.exit_code == 0, done.output
    lines: list[dict[str, Any]] = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert (
            line["correction/log_prob_diff/max"] < 2e-5
        )  # sampler and trainer see the same pictures at the same positions
        assert line["policy/grad_norm"] > 0
        assert line["rollout/env_failures"] == 0
    assert Path("run/checkpoints/checkpoint-000002/model/preprocessor_config.json").is_file()
