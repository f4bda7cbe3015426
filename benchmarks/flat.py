"""Memory, open files and threads of a long asynchronous run: `python benchmarks/flat.py [STEPS]` prints them for each
`weight_update`, by the step at which they were read.

The fakes alone, so that what grows is the engine's: environments step in threads and fail in a fifth of the groups, an
evaluation every 25 steps, a checkpoint every 10."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from turnwise.testing.runs import FAKES, written

WAYS = ("between_batches", "between_turns", "between_tokens")
EVERY = 50
"""Steps between two lines of the table."""
SECONDS = 1200
"""What one run may take."""


@frozen
class Held:
    """What the process held after `step` steps: memory in MiB, open file descriptors, threads. Each is the median of
    what was read in the `EVERY` steps before."""

    step: int
    memory: float
    files: float
    threads: float


def configuration(steps: int, way: str) -> str:
    """The run."""
    return written(
        FAKES,
        {
            "max_steps": steps,
            "eval_steps": 25,
            "save_steps": 10,
            "max_ckpt_to_keep": 2,
            "async_generation_ratio": 1,
            "weight_update": way,
            "rollout_batch_size": 16,
            "sequence_length": 128,
            "runtime": "local",
            "track_with": [{"use": "jsonl", "every": 1}],
            "actor_train.training_args.learning_rate": 0.05,
            "actor_train.training_args.per_device_train_batch_size": 4,
            "train_env_manager": {
                "num_env_groups": 4,
                "group_size": 4,
                "tags": ["Toy"],
                "max_env_failure_rate": 0.9,
                "max_env_retries": 1,
            },
            "val_env_manager.max_env_failure_rate": 0.9,
            "custom_envs.Toy.step": "thread",
            "custom_envs.Toy.env_config": {"fails": "raise", "fails_every": 5},
        },
    )


def read(pid: int) -> tuple[float, float, float]:
    """Memory in MiB, open files and threads of a process. Raises OSError where it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    values = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines) if rest.strip()}
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(values["VmRSS"]) / 1024, float(files), float(values["Threads"])


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def watch(folder: Path, steps: int, way: str) -> Iterator[Held]:
    """Run `steps` steps in a process of its own and read it after every one."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(configuration(steps, way), encoding="utf-8")
    metrics = folder / "out/metrics.jsonl"
    with (folder / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "turnwise.cli.main", "train", "run.yaml"]
        running = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    read: list[tuple[float, float, float]] = []
    done, deadline = 0, time.monotonic() + SECONDS
    try:
        while running.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"{way}: {done} steps in {SECONDS} s")
            time.sleep(0.05)
            now = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            try:
                read.append(read(running.pid))
            except (OSError, KeyError):  # it is ending
                running.wait(SECONDS)
                break
            if now // EVERY > done // EVERY:
                yield Held(now, *(_median([one[column] for one in read]) for column in range(3)))
                read = []
            done = now
    finally:
        running.kill()
        running.wait()
    if running.returncode:
        raise SystemExit(f"{way} ended early:\n{(folder / 'log.txt').read_text(encoding='utf-8')[-2000:]}")


def main(steps: int = 500) -> None:
    """Print the table."""
    print(f"{'weight_update':<16} {'step':>5} {'MiB':>8} {'files':>6} {'threads':>8}")
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            for held in watch(Path(folder) / "run", steps, way):
                print(
                    f"{way:<16} {held.step:>5} {held.memory:>8.1f} {held.files:>6.0f} {held.threads:>8.0f}", flush=True
                )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
