"""Whole runs of a tiny FrozenLake through the command line: as in one process, and through the death of every kind of process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is not installed")

pytestmark = pytest.mark.engines

LAKE = """\
exp_name: lake
plugins: [turnwise-ray, turnwise-gymnasium, turnwise-managers, turnwise-hf, turnwise-torch, turnwise-grpo, turnwise-losses, turnwise-batching]
seed: 1
output_dir: out
max_steps: 2
save_steps: 1
rollout_batch_size: 8
sequence_length: 256
pretrain: {recipe: {architecture: qwen2, num_layers: 1, hidden_size: 16, num_heads: 2, tokenizer: word}}
adv_estimator: grpo
recompute_old_logprobs: true
actor_train:
  model_args: {dtype: fp32, disable_gradient_checkpointing: true}
  training_args: {learning_rate: 1.0e-2, per_device_train_batch_size: 4}
  strategy_args: {strategy_name: torch}
  device_mapping: [0]
actor_infer:
  model_args: {dtype: fp32}
  generating_args: {max_new_tokens: 2, temperature: 1.0}
  strategy_args: {strategy_name: hf}
train_env_manager: {num_env_groups: 2, group_size: 4, tags: [Lake]}
custom_envs:
  Lake:
    env_type: frozen_lake
    env_manager: {use: stepwise, history_length: 1}
    max_steps: 4
    step: inline
    env_config: {random_start_goal: true, observation: relative, hole_penalty: -0.5, invalid_penalty: -0.3}
track_with: [{use: jsonl, every: 1}]
"""
RAY = "runtime={use: ray, device: cpu, object_store_mb: 100}"


def turnwise(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "turnwise.cli.main", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def metrics(folder: Path, out: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "tps/", "system/"))} for line in lines]


def test_a_run_on_ray_gives_the_same_numbers_as_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(LAKE)
    alone = turnwise(tmp_path, "train", "run.yaml", "actor_train.device_mapping=[]", "output_dir=alone")
    assert alone.returncode == 0, alone.stderr
    assert (tmp_path / "alone").is_dir()
    there = turnwise(tmp_path, "train", "run.yaml", RAY, "output_dir=there")
    assert there.returncode == 0, there.stderr
    assert metrics(tmp_path, "there") == metrics(tmp_path, "alone")
    assert "Traceback" not in there.stderr


COLOCATED = """\
plugins: [turnwise-ray, turnwise.testing.plugin, {fakes}]
output_dir: out
max_steps: 1
rollout_batch_size: 4
sequence_length: 64
model_source: fake
pretrain: fake
adv_estimator: fake
pg_variant: fake
batch_adjust_mode: fake
track_with: [jsonl]
eval_steps: 0
actor_train:
  training_args: {{learning_rate: 5.0, per_device_train_batch_size: 2}}
  strategy_args: {{strategy_name: noted}}
  device_mapping: [0]
actor_infer:
  generating_args: {{max_new_tokens: 4}}
  strategy_args: {{strategy_name: noted}}
  device_mapping: [0]
train_env_manager: {{num_env_groups: 2, group_size: 2, tags: [Toy]}}
custom_envs:
  Toy: {{env_type: fake, env_manager: fake, max_steps: 3, step: inline}}
"""


def test_roles_of_one_device_sleep_and_wake_and_what_they_say_comes_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(COLOCATED.format(fakes=Path(__file__).with_name("ray_fakes.py")))
    done = turnwise(tmp_path, "train", "run.yaml", RAY)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "order").read_text().split() == [
        *("actor_train.offer", "actor_infer.receive", "actor_train.offload"),  # the first weights
        *("actor_infer.sleep", "actor_train.onload"),  # training
        *("actor_infer.wake", "actor_train.offer", "actor_infer.receive", "actor_train.offload"),  # the new weights
        *("actor_infer.sleep", "actor_train.onload", "actor_train.save", "actor_train.offload", "actor_infer.wake"),  # the last checkpoint
    ]
    assert re.search(r" INFO actor_train, rank 0 of 1 on \S+: wrote with chalk\n", (tmp_path / "out" / "run.log").read_text())
    assert re.search(r"\(actor_train pid=\d+\)\S* chalk dust\n", done.stdout + done.stderr)


@pytest.fixture
def two_nodes() -> Iterator[str]:
    """The address of Ray's own test cluster: two nodes on this machine, each with room for one process."""
    from ray.cluster_utils import Cluster

    room = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**room, "include_dashboard": False})
    cluster.add_node(**room)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize("sync", ["merged", pytest.param("adapter", marks=pytest.mark.matrix)])
def test_a_sampler_on_another_node_has_the_trainers_weights_at_every_step(tmp_path: Path, two_nodes: str, sync: str) -> None:
    (tmp_path / "run.yaml").write_text(LAKE)
    placed = f"runtime={{use: ray, device: cpu, address: '{two_nodes}', cpus_per_process: 2}}"
    adapters = [] if sync == "merged" else ["actor_train.model_args.lora_rank=4", "actor_train.model_args.lora_sync=adapter"]
    done = turnwise(tmp_path, "train", "run.yaml", placed, *adapters, "max_steps=3", "actor_train.training_args.learning_rate=0.1")
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path, "out")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert max(line["correction/log_prob_diff/max"] for line in lines) < 1e-4, lines
    assert max(line["policy/grad_norm"] for line in lines[:2]) > 0.01  # the weights moved: old ones would tell
    ray.init(address=two_nodes, log_to_driver=False, logging_level="ERROR")
    names = Counter(actor["ActorClassName"] for actor in ray._private.state.actors().values())
    assert names["RelaySource"] == names["RelaySink"] == 3 + 1  # before the first step, and after each


def test_every_kind_of_process_may_die_and_the_run_ends_or_goes_on_as_it_should(tmp_path: Path) -> None:
    """The sampling engine and the environment worker in the first step, from which the run recovers; the trainer in the second, which ends it."""
    (tmp_path / "graves").mkdir()
    plugin = Path(__file__).with_name("ray_lake.py")
    text = LAKE.replace("turnwise-batching]", f"turnwise-batching, {plugin}]")
    for name in ("torch", "hf"):
        text = text.replace(f"strategy_name: {name}}}", f"strategy_name: mortal_{name}}}")
    text = text.replace("env_type: frozen_lake", "env_type: mortal_lake").replace(
        "strategy_name: mortal_hf}", "strategy_name: mortal_hf}\n  device_mapping: [1, 2]"
    )
    (tmp_path / "run.yaml").write_text(text)
    workers = RAY.replace("cpu,", "cpu, env_workers: 2,")
    first = turnwise(tmp_path, "train", "run.yaml", workers)
    assert first.returncode == 1, first.stderr
    assert sorted(path.name for path in (tmp_path / "graves").iterdir()) == ["environment", "sampler", "trainer"]
    log = (tmp_path / "out" / "run.log").read_text()
    assert re.search(r"WARNING actor_infer\.\d died: .*built again \(1 of max_restarts: 3\)", log)
    assert re.search(r"WARNING env_worker\.\d died: .*started again \(1 of max_restarts: 3\)", log)
    assert re.search(r"actor_train, rank 0 of 1 on \S+: the process died in update\.", first.stderr)
    assert "saved: out/checkpoints/checkpoint-000001" in first.stderr
    resume = next(line for line in first.stderr.splitlines() if line.startswith("resume: "))
    assert resume.endswith("resume_from_checkpoint=true")
    assert "Traceback" not in first.stderr
    alone = ["runtime=local", "actor_train.device_mapping=[]", "actor_infer.device_mapping=[]"]  # the checkpoint is anybody's
    second = turnwise(tmp_path, "train", "run.yaml", *alone, "resume_from_checkpoint=true")
    assert second.returncode == 0, second.stderr
    assert [line["step"] for line in metrics(tmp_path, "out")] == [0, 1]
