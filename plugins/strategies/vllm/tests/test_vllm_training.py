"""`turnwise train` with vLLM sampling images; the README's YAML is run by tests/test_readmes.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_cases import NEEDS_VLLM

pytestmark = [pytest.mark.engines, NEEDS_VLLM, pytest.mark.timeout(300)]

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
    (tmp_path / "run.yaml").write_text(
        PICTURES.format(options=json.dumps({"load_format": "dummy", **vision_options})), encoding="utf-8"
    )
    code = "from turnwise.cli.main import main; main()"
    command = [sys.executable, "-c", code, "train", "run.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert (
            line["correction/log_prob_diff/max"] < 1e-4
        )  # sampler and trainer see the same pictures at the same positions
        assert line["policy/grad_norm"] > 0
        assert line["rollout/env_failures"] == 0
