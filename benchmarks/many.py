"""Many episodes at once in an asynchronous run of fakes: `python benchmarks/many.py [EPISODES…]` prints a row for each
number (500, 1000, 2000) in each `weight_update`.

Every response takes 50 ms of no processor, so that all episodes that are admitted, those of two steps, are open at
once; environments step in threads of their own. What must not grow with the number of episodes is the processor's time
for one turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flat import WAYS, read

from turnwise.testing.runs import FAKES, written

STEPS, TURNS, SIZE = 6, 3, 10
SECONDS = 900
"""What one run may take."""


def configuration(episodes: int, way: str) -> str:
    """The run: `episodes` of them open at once, half of a step that waits to be trained, half of the next."""
    step = episodes // 2
    return written(
        FAKES,
        {
            "max_steps": STEPS,
            "eval_steps": 0,
            "eval_at_end": False,
            "save_steps": 2,
            "max_ckpt_to_keep": 1,
            "async_generation_ratio": 1,
            "weight_update": way,
            "rollout_batch_size": step,
            "sequence_length": 128,
            "runtime": "local",
            "track_with": [{"use": "jsonl", "every": 1}],
            "actor_train.training_args.learning_rate": 0.05,
            "actor_train.training_args.per_device_train_batch_size": step,
            "actor_infer.strategy_args.strategy_config": {"delay": 0.05},
            "train_env_manager": {"num_env_groups": step // SIZE, "group_size": SIZE, "tags": ["Toy"]},
            "custom_envs.Toy.step": "thread",
            "custom_envs.Toy.env_config": {"length": TURNS},
        },
    )


def row(folder: Path, episodes: int, way: str) -> str:
    """Run it in a process of its own; what it took and held at most."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(configuration(episodes, way), encoding="utf-8")
    with (folder / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "turnwise.cli.main", "train", "run.yaml"]
        running = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    held, deadline = (0.0, 0.0, 0.0), time.monotonic() + SECONDS
    metrics, busy = folder / "out/metrics.jsonl", dict[int, float]()
    try:
        while running.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"{episodes} episodes, {way}: over {SECONDS} s")
            time.sleep(0.05)
            try:
                memory, files, threads = read(running.pid)
                steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
                busy.setdefault(steps, _processor(running.pid))
            except (OSError, KeyError):  # it is ending
                break
            held = max(held[0], memory), max(held[1], files), max(held[2], threads)
    finally:
        if time.monotonic() > deadline:
            running.kill()
        running.wait()
    if running.returncode:
        raise SystemExit(f"{way} ended early:\n{(folder / 'log.txt').read_text(encoding='utf-8')[-2000:]}")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    # The first step builds the environments; beside the last nothing is played.
    seconds = sorted(line["time/step"] for line in lines[1:-1])[(STEPS - 2) // 2]
    first, last = min(step for step in busy if step), max(busy)
    turn = (busy[last] - busy[first]) / ((last - first) * episodes // 2 * TURNS)
    memory, files, threads = held
    return f"{way:<16} {episodes:>8} {seconds:>11.2f} {1000 * turn:>13.3f} {memory:>8.0f} {files:>6.0f} {threads:>8.0f}"


def _processor(pid: int) -> float:
    """Seconds that a process has had of the processor."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(*numbers: int) -> None:
    """Print the table."""
    print(
        f"{'weight_update':<16} {'episodes':>8} {'s a step':>11} {'CPU ms a turn':>13} {'MiB':>8} {'files':>6} {'threads':>8}"
    )
    for way in WAYS:
        for episodes in numbers or (500, 1000, 2000):
            with tempfile.TemporaryDirectory() as folder:
                print(row(Path(folder) / "run", episodes, way), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
