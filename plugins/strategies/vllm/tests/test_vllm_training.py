"""`turnwise train` with vLLM sampling and torch training, as a user starts it."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MISSING = "vllm is not installed (extra: turnwise-vllm[vllm] or [cpu])"
pytestmark = [pytest.mark.engines, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=MISSING), pytest.mark.timeout(300)]

YAML = """
exp_name: frozen_lake_vllm
seed: 0
output_dir: {folder}/run
pretrain: {{recipe: {{architecture: qwen2, hidden_size: 64, num_layers: 2, num_heads: 2, initializer_range: 0.1, tokenizer: word}}}}
max_steps: 2
eval_steps: 2
rollout_batch_size: 16
val_batch_size: 8
sequence_length: 256
adv_estimator: grpo
pg_variant: ppo
recompute_old_logprobs: true
actor_train:
  model_args: {{dtype: fp32, disable_gradient_checkpointing: true}}
  training_args: {{learning_rate: 3.0e-3, per_device_train_batch_size: 16, gradient_accumulation_steps: 1}}
  strategy_args: {{strategy_name: torch}}
actor_infer:
  model_args: {{dtype: fp32}}
  generating_args: {{max_new_tokens: 6, temperature: 0.9}}
  strategy_args: {{strategy_name: vllm, strategy_config: {{load_format: dummy}}}}
train_env_manager: {{num_env_groups: 4, group_size: 4, tags: [FrozenLake]}}
val_env_manager: {{num_env_groups: 8, group_size: 1, tags: [FrozenLake]}}
custom_envs:
  FrozenLake:
    env_type: frozen_lake
    env_manager: {{use: stepwise, history_length: 0, agent_system_template: Cross the lake., action_pattern: (.*)}}
    max_steps: 3
    step: inline
    env_config: {{size: 4, random_start_goal: true, observation: relative}}
track_with: [jsonl]
"""


def test_a_run_trains_on_what_vllm_samples(tmp_path: Path) -> None:
    config = tmp_path / "lake.yaml"
    config.write_text(YAML.format(folder=tmp_path), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", "from turnwise.cli.main import main; main()", "train", str(config)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    files = list((tmp_path / "run").rglob("*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    metrics = [{**line, **line.get("metrics", {})} for line in lines]
    successes = [line["val/success"] for line in metrics if "val/success" in line]
    gaps = [line["correction/log_prob_diff/max"] for line in metrics if "correction/log_prob_diff/max" in line]
    assert successes
    assert all(math.isfinite(value) for value in successes)
    assert len(gaps) == 2, "one comparison of the trainer's log-probs with the sampler's per step"
    assert max(gaps) < 1e-3


PICTURES = """
plugins: [turnwise.testing.plugin, turnwise-managers, turnwise-hf, turnwise-torch, turnwise-vllm, turnwise-grpo, turnwise-losses, turnwise-batching]
output_dir: run
pretrain: {{recipe: {{architecture: qwen2_5_vl, hidden_size: 64, num_heads: 2, initializer_range: 0.1}}}}
max_steps: 2
rollout_batch_size: 8
sequence_length: 128
recompute_old_logprobs: "true"
actor_train:
  model_args: {{dtype: fp32}}
  training_args: {{learning_rate: 1.0e-3, per_device_train_batch_size: 2, gradient_accumulation_steps: 2}}
  strategy_args: {{strategy_name: torch}}
actor_infer:
  model_args: {{dtype: fp32}}
  generating_args: {{max_new_tokens: 4, temperature: 0.9}}
  strategy_args: {{strategy_name: vllm, strategy_config: {options}}}
train_env_manager: {{num_env_groups: 2, group_size: 4, tags: [Lamp]}}
custom_envs:
  Lamp: {{env_type: fake_lamp, env_manager: {{use: trajectory, action_pattern: (.*)}}, max_steps: 2, step: inline}}
track_with: [jsonl]
"""


def test_a_run_on_pictures(tmp_path: Path, vision_options: dict[str, Any]) -> None:
    (tmp_path / "run.yaml").write_text(PICTURES.format(options=json.dumps({"load_format": "dummy", **vision_options})), encoding="utf-8")
    code = "from turnwise.cli.main import main; main()"
    command = [sys.executable, "-c", code, "train", "run.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["correction/log_prob_diff/max"] < 1e-4  # sampler and trainer see the same pictures at the same positions
        assert line["policy/grad_norm"] > 0
        assert line["rollout/env_failures"] == 0
