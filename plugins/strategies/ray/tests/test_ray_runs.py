"""Whole runs of a tiny FrozenLake through the command line: as in one process, and through the death of every kind of
process."""

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

from turnwise.testing.runs import FAKES, LAKE, written

ray = pytest.importorskip("ray", reason="ray is not installed")

pytestmark = pytest.mark.engines


def on_ray(*further: str, **changes: Any) -> str:
    """The run for Ray, with further plugins; changes by key, a dot written as two underscores."""
    plugins = ["turnwise-ray", *LAKE["plugins"], *further]
    keys = {"plugins": plugins, "recompute_old_logprobs": True, "actor_train.device_mapping": [0]}
    return written(LAKE, keys | {key.replace("__", "."): value for key, value in changes.items()})


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
    (tmp_path / "run.yaml").write_text(on_ray())
    alone = turnwise(tmp_path, "train", "run.yaml", "actor_train.device_mapping=[]", "output_dir=alone")
    assert alone.returncode == 0, alone.stderr
    assert (tmp_path / "alone").is_dir()
    there = turnwise(tmp_path, "train", "run.yaml", RAY, "output_dir=there")
    assert there.returncode == 0, there.stderr
    assert metrics(tmp_path, "there") == metrics(tmp_path, "alone")
    assert "Traceback" not in there.stderr


@pytest.mark.slow
def test_batches_ahead_are_as_reproducible_with_trainer_sampler_and_environments_in_processes(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(on_ray(max_steps=4))
    ahead = ["async_generation_ratio=1", "recompute_old_logprobs=auto"]
    alone = turnwise(tmp_path, "train", "run.yaml", *ahead, "actor_train.device_mapping=[]", "output_dir=alone")
    assert alone.returncode == 0, alone.stderr
    workers = RAY.replace("cpu,", "cpu, env_workers: 2,")
    there = turnwise(
        tmp_path, "train", "run.yaml", *ahead, workers, "actor_infer.device_mapping=[1]", "output_dir=there"
    )
    assert there.returncode == 0, there.stderr
    mine, theirs = (
        [{k: v for k, v in line.items() if not k.startswith("async/groups/")} for line in metrics(tmp_path, out)]
        for out in ("alone", "there")
    )
    assert mine == theirs
    assert [line["async/staleness/max"] for line in mine if "async/staleness/max" in line] == [0, 1, 1, 1]
    shared = turnwise(tmp_path, "train", "run.yaml", *ahead, RAY, "actor_infer.device_mapping=[0]")
    assert "$.async_generation_ratio: 1 plays while the trainer trains" in shared.stderr


COLOCATED = {
    "plugins": ["turnwise-ray", "turnwise.testing.plugin", str(Path(__file__).with_name("ray_fakes.py"))],
    "max_steps": 1,
    "eval_steps": 0,
    "track_with": ["jsonl"],
    "actor_train.strategy_args.strategy_name": "noted",
    "actor_train.device_mapping": [0],
    "actor_infer.strategy_args.strategy_name": "noted",
    "actor_infer.device_mapping": [0],
    "val_env_manager": None,
}


def test_roles_of_one_device_sleep_and_wake_and_what_they_say_comes_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(written(FAKES, COLOCATED))
    done = turnwise(tmp_path, "train", "run.yaml", RAY)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "order").read_text().split() == [
        *("actor_train.offload", "actor_infer.sleep", "actor_train.onload"),  # an engine starts alone
        *("actor_infer.wake(weights)", "actor_train.offer", "actor_infer.receive"),  # the first weights
        *("actor_train.offload", "actor_infer.wake(cache)"),
        *("actor_infer.sleep", "actor_train.onload"),  # training
        *("actor_infer.wake(weights)", "actor_train.offer", "actor_infer.receive"),  # the new weights
        *("actor_train.offload", "actor_infer.wake(cache)"),
        *("actor_infer.sleep", "actor_train.onload", "actor_train.save", "actor_train.offload"),  # the last checkpoint
        *("actor_infer.wake(weights)", "actor_infer.wake(cache)"),
    ]
    assert re.search(
        r" INFO actor_train, rank 0 of 1 on \S+: wrote with chalk\n", (tmp_path / "out" / "run.log").read_text()
    )
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
def test_a_sampler_on_another_node_has_the_trainers_weights_at_every_step(
    tmp_path: Path, two_nodes: str, sync: str
) -> None:
    (tmp_path / "run.yaml").write_text(on_ray())
    placed = f"runtime={{use: ray, device: cpu, address: '{two_nodes}', cpus_per_process: 2}}"
    adapters = (
        [] if sync == "merged" else ["actor_train.model_args.lora_rank=4", "actor_train.model_args.lora_sync=adapter"]
    )
    done = turnwise(
        tmp_path, "train", "run.yaml", placed, *adapters, "max_steps=3", "actor_train.training_args.learning_rate=0.1"
    )
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path, "out")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert max(line["correction/log_prob_diff/max"] for line in lines) < 1e-4, lines
    assert max(line["policy/grad_norm"] for line in lines[:2]) > 0.01  # the weights moved: old ones would tell
    ray.init(address=two_nodes, log_to_driver=False, logging_level="ERROR")
    names = Counter(actor["ActorClassName"] for actor in ray._private.state.actors().values())
    assert names["RelaySource"] == names["RelaySink"] == 3 + 1  # before the first step, and after each


def test_every_kind_of_process_may_die_and_the_run_ends_or_goes_on_as_it_should(tmp_path: Path) -> None:
    """The sampling engine and the environment worker in the first step, from which the run recovers; the trainer in the
    second, which ends it."""
    (tmp_path / "graves").mkdir()
    plugin = Path(__file__).with_name("ray_lake.py")
    text = on_ray(
        str(plugin),
        actor_train__strategy_args__strategy_name="mortal_torch",
        actor_infer__strategy_args__strategy_name="mortal_hf",
        actor_infer__device_mapping=[1, 2],
        custom_envs__Lake__env_type="mortal_lake",
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
    alone = [
        "runtime=local",
        "actor_train.device_mapping=[]",
        "actor_infer.device_mapping=[]",
    ]  # the checkpoint is anybody's
    second = turnwise(tmp_path, "train", "run.yaml", *alone, "resume_from_checkpoint=true")
    assert second.returncode == 0, second.stderr
    assert [line["step"] for line in metrics(tmp_path, "out")] == [0, 1]
