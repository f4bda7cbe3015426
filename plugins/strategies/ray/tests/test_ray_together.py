"""Whole runs with every trainer in many processes: what the run trains beside the actor, how it ends, and what it
leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from turnwise.testing.runs import LAKE, written

pytest.importorskip("ray", reason="ray is not installed")

pytestmark = [pytest.mark.engines, pytest.mark.matrix, pytest.mark.timeout(600)]

PLUGINS = ["turnwise-ray", *LAKE["plugins"]]
CHANGES = {
    "max_steps": 3,
    "recompute_old_logprobs": True,
    "runtime": {"use": "ray", "device": "cpu", "object_store_mb": 100},
    "actor_train.training_args.per_device_train_batch_size": 2,
    "actor_train.device_mapping": [0, 1],
    "val_env_manager": {"num_env_groups": 2, "group_size": 1, "tags": ["Lake"]},
}


def on_ray(*further: str) -> str:
    """The run on Ray with two training processes, and further plugins."""
    return written(LAKE, {**CHANGES, "plugins": [*PLUGINS, *further]})


ZERO3 = (
    "{strategy_name: deepspeed_train, strategy_config: {zero_optimization: {stage: 3,"
    " stage3_param_persistence_threshold: 0}}}"
)
TRAINERS = {
    "torch": "{strategy_name: torch}",
    "deepspeed": ZERO3,
    "megatron": "{strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}",
}
SHORT_OF_MEMORY = '''
import torch
import torch.distributed as dist
import turnwise


class ShortOfMemory:
    """A loss that rank 1 has no memory for."""

    def __init__(self, config, context):
        pass

    def loss(self, view):
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return -view.advantages * view.log_probs, {}


@turnwise.hookimpl
def policy_losses():
    return [turnwise.Implementation("short_of_memory", ShortOfMemory)]
'''


class Run:
    """Runs in a folder of their own, whose processes and temporary files are known from all others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"TURNWISE_TEST_RUN={folder}"
        (folder / "run.yaml").write_text(on_ray())
        name, _, value = self.mark.partition("=")
        self.temporary = Path(
            tempfile.mkdtemp(prefix="run-", dir="/tmp")
        )  # the names of Ray's and vLLM's sockets must be short
        places = {"TMPDIR": str(self.temporary), "RAY_TMPDIR": "/tmp"}
        self.environment = os.environ | places | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", name: value}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A run in a process group of its own, as a shell starts one."""
        command = [sys.executable, "-m", "turnwise.cli.main", *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def whole(self, *arguments: str) -> str:
        """What a run that ends well writes to stderr."""
        running = self.start(*arguments)
        _, stderr = running.communicate(timeout=400)
        assert running.returncode == 0, stderr
        return stderr

    def metrics(self, out: str = "out") -> list[dict[str, Any]]:
        """All lines, without what the clock decides."""
        file = self.folder / out / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [{k: v for k, v in line.items() if not k.startswith(("time/", "tps/", "system/"))} for line in lines]

    def processes(self) -> dict[int, str]:
        """What runs of it, by process id."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(self.mark in f"{name}={value}" for name, value in process.environ().items()):
                    found[process.pid] = next(iter(process.cmdline()), "")
        return found

    def until(self, holds: Callable[[], Any], seconds: float = 300.0) -> None:
        """Wait."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.processes()
            time.sleep(0.05)

    def left_nothing(self, seconds: float) -> None:
        """No process, and no file but Ray's logs."""
        self.until(lambda: not self.processes(), seconds)
        assert not [path.name for path in self.temporary.iterdir() if path.name.startswith("turnwise")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A folder for runs; what one leaves is ended."""
    made = Run(tmp_path)
    yield made
    for process in made.processes():
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    shutil.rmtree(made.temporary, ignore_errors=True)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_run_whose_driver_was_killed_goes_on_as_if_it_had_not_been(run: Run, trainer: str) -> None:
    chosen = f"actor_train.strategy_args={TRAINERS[trainer]}"
    run.whole("train", "run.yaml", chosen, "output_dir=whole")
    run.left_nothing(20)
    running = run.start("train", "run.yaml", chosen)
    run.until(lambda: len(run.metrics()) >= 2)
    running.kill()
    running.communicate()
    run.left_nothing(120)  # Ray's agents wait a minute for its head
    run.whole("train", "run.yaml", chosen, "resume_from_checkpoint=true")
    assert run.metrics() == run.metrics("whole")
    run.left_nothing(20)


def test_a_sampler_of_experts_has_the_weights_of_the_ranks_that_share_them(run: Run) -> None:
    recipe = (
        "pretrain.recipe={architecture: qwen3_moe, num_layers: 2, hidden_size: 16, num_heads: 2, tokenizer: word,"
        " initializer_range: 0.1}"
    )
    chosen = (
        "actor_train.strategy_args={strategy_name: megatron_train, strategy_config: {expert_model_parallel_size: 2}}"
    )
    run.whole("train", "run.yaml", recipe, chosen, "max_steps=3", "actor_train.training_args.learning_rate=0.1")
    lines = run.metrics()
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert max(line["correction/log_prob_diff/max"] for line in lines) < 1e-4, lines
    assert max(line["policy/grad_norm"] for line in lines[:2]) > 0.01  # the weights moved: old ones would tell
    run.left_nothing(20)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_rank_without_memory_is_reported_at_once_though_the_others_wait_for_it(run: Run, trainer: str) -> None:
    (run.folder / "short.py").write_text(SHORT_OF_MEMORY)
    (run.folder / "run.yaml").write_text(on_ray("./short.py"))
    running = run.start(
        "train", "run.yaml", f"actor_train.strategy_args={TRAINERS[trainer]}", "pg_variant=short_of_memory"
    )
    _, stderr = running.communicate(timeout=300)  # ranks wait for each other for ten minutes
    assert running.returncode == 1
    assert "error: actor_train, rank 1 of 2 on " in stderr
    assert (
        "out of memory, in the update of actor_train. Fix: lower actor_train.training_args.per_device_train_batch_size"
        in stderr
    )
    assert "; saved: " in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    run.left_nothing(20)


def test_a_rank_that_dies_ends_the_run(run: Run) -> None:
    running = run.start("train", "run.yaml", "max_steps=100")
    run.until(lambda: len(run.metrics()) >= 2)
    victim = max(process for process, name in run.processes().items() if name.startswith("ray::TrainRank"))
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 1
    assert time.monotonic() - began < 60
    assert re.search(r"error: actor_train, rank [01] of 2 on \S+: the process died", stderr), (
        stderr
    )  # which rank is the youngest process is chance
    assert "saved: out/checkpoints/checkpoint-" in stderr
    assert "resume_from_checkpoint=true" in stderr
    run.left_nothing(20)


@pytest.mark.parametrize("victim", ["VLLM::EngineCore", "VLLM::Worker"])
def test_a_vllm_of_two_processes_that_loses_one_is_built_again_and_the_run_goes_on(run: Run, victim: str) -> None:
    """Without devices it starts its tensor parallel processes itself, from the one place that it has."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    (run.folder / "run.yaml").write_text(on_ray("turnwise-vllm"))
    # vLLM's smallest heads
    recipe = "pretrain.recipe={architecture: qwen2, num_layers: 2, hidden_size: 64, num_heads: 2, tokenizer: word}"
    engine = (
        "actor_infer.strategy_args={strategy_name: vllm, strategy_config: {load_format: dummy,"
        " tensor_parallel_size: 2}}"
    )
    running = run.start("train", "run.yaml", recipe, engine, "actor_train.device_mapping=[]", "max_steps=4")
    run.until(
        lambda: running.poll() is not None or len(run.metrics()) >= 2
    )  # the weights of step 2 are there, and its episodes begin
    assert running.poll() is None, running.communicate()[1]
    os.kill(next(process for process, name in run.processes().items() if name.startswith(victim)), signal.SIGKILL)
    _, stderr = running.communicate(timeout=400)
    assert running.returncode == 0, stderr
    log = (run.folder / "out" / "run.log").read_text()
    assert re.search(r"WARNING actor_infer\.0 died: .*vLLM.*It is built again \(1 of max_restarts: 3\)", log), log
    assert "actor_infer.0 has the current weights again" in log
    lines = run.metrics()
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert max(line["correction/log_prob_diff/max"] for line in lines) < 1e-4, lines
    run.left_nothing(20)


def test_an_interrupt_of_the_whole_process_group_saves_and_leaves_nothing(run: Run) -> None:
    running = run.start("train", "run.yaml", "max_steps=100", "save_steps=0", "actor_infer.device_mapping=[0, 1]")
    run.until(lambda: len(run.metrics()) >= 1)
    os.killpg(running.pid, signal.SIGINT)
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 130, stderr
    assert "saved: out/checkpoints/checkpoint-" in stderr
    assert "resume_from_checkpoint=true" in stderr
    run.left_nothing(20)
