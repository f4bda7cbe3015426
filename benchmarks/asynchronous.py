"""What asynchronous training saves where environments wait, and what it learns at equal trajectories.

    python benchmarks/asynchronous.py [--steps 8] [--repeats 2] [--ray]
    python benchmarks/asynchronous.py --learning 0 1 2 4 [--seeds 0 1 2] [--uncorrected]

The first times a step with r = 0 and r = 1, side by side: the main job's tasks and a larger model, and every
environment step waits 20 ms to 2 s (waiting_lake.py). What the synchronous run spends on rollout and on training stands
beside it: a step takes at least the longer of the two. The first steps, which start everything, are left out.

The second runs the main job as it is with every r and seed named; `--uncorrected`: without the importance weights that
correct for the age of the tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "examples" / "frozen_lake.yaml"
FIRST = 2
"""Steps left out: they build the environments, and with r = 1 the first one has nothing to overlap with."""
PLUGINS = (
    *("turnwise-gymnasium", "turnwise-managers", "turnwise-hf", "turnwise-torch", "turnwise-grpo"),
    *("turnwise-losses", "turnwise-batching", "turnwise-ray"),
)
RAY = "runtime={use: ray, device: cpu, object_store_mb: 200}"


def trained(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of every step of a run of the main job with these overrides."""
    subprocess.run(
        [sys.executable, "-m", "turnwise.cli.main", "train", str(CONFIG), *overrides, f"output_dir={folder}"],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def waiting(folder: Path, ratio: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """The metrics of a run whose environments wait, without the first steps."""
    overrides = [
        f"plugins=[{', '.join([*PLUGINS, str(HERE / 'waiting_lake.py')])}]",
        *([RAY, "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]"] if options.ray else []),
        "custom_envs.FrozenLake.env_type=waiting_lake",
        f"async_generation_ratio={ratio}",
        f"max_steps={options.steps + FIRST}",
        "eval_steps=0",
        "eval_at_end=false",
        "val_env_manager=null",
        "baselines=[]",
        "recompute_old_logprobs=true",
        f"rollout_batch_size={options.episodes}",
        f"train_env_manager.num_env_groups={options.episodes // 16}",
        f"pretrain.recipe.hidden_size={options.hidden}",
        f"pretrain.recipe.num_layers={options.layers}",
        "actor_train.training_args.per_device_train_batch_size=16",
        "track_with=[jsonl]",
    ]
    return trained(folder, *overrides)[FIRST:]


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step of both ways, alternating, and what the synchronous one spends on each half."""
    steps: dict[int, list[float]] = {0: [], 1: []}
    rollout: list[float] = []
    for _ in range(options.repeats):
        for ratio in steps:
            with tempfile.TemporaryDirectory() as place:
                lines = waiting(Path(place) / "out", ratio, options)
            steps[ratio] += [line["time/step"] for line in lines]
            if ratio == 0:
                rollout += [line["time/rollout"] for line in lines]
    alone = float(np.median(rollout))
    train = float(np.median(np.subtract(steps[0], rollout)))
    return {
        "rollout": alone,
        "train": train,
        "synchronous": float(np.median(steps[0])),
        "asynchronous": float(np.median(steps[1])),
    }


def table(found: dict[str, float], options: argparse.Namespace) -> str:
    """The page."""
    longer = max(found["rollout"], found["train"])
    where = "Ray, one training and one sampling process" if options.ray else "one process"
    return "\n".join(
        [
            f"Machine: {os.cpu_count()} cores of {platform.machine()}, no GPU, OMP_NUM_THREADS=1; {where}; "
            f"{options.episodes} episodes a step of 8 turns at most, each environment step waits 20 ms to 2 s; "
            f"{options.layers} layers of {options.hidden}; median of {options.steps * options.repeats} steps.",
            "",
            "| a step, s | rollout alone | training alone | r = 0 | r = 1 | r = 1 ÷ the longer | r = 0 ÷ r = 1 |",
            "|---|---:|---:|---:|---:|---:|---:|",
            f"| {where} | {found['rollout']:.2f} | {found['train']:.2f} | {found['synchronous']:.2f} | "
            f"{found['asynchronous']:.2f} | {found['asynchronous'] / longer:.2f} | "
            f"{found['synchronous'] / found['asynchronous']:.2f} |",
            "",
        ]
    )


def learning(options: argparse.Namespace) -> str:
    """The main job's table: greedy success on held-out levels after the same number of trajectories."""
    correction = ["train_infer_correction=null"] if options.uncorrected else []
    lines = [
        f"Machine: {os.cpu_count()} cores of {platform.machine()}, no GPU, OMP_NUM_THREADS=1; "
        "examples/frozen_lake.yaml with async_generation_ratio=r, weight_update: between_batches; importance weights"
        f" {'off' if correction else 'of at most 2 where r > 0'}.",
        "",
        "| r | seed | success before | success after | staleness, mean | effective sample size, mean |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for ratio in options.learning:
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as place:
                overrides = (f"async_generation_ratio={ratio}", f"seed={seed}", *correction)
                steps = trained(Path(place) / "out", *overrides)
            stale, ess = (
                [step[name] for step in steps if name in step] for name in ("async/staleness/mean", "async/ess")
            )
            lines.append(
                f"| {ratio} | {seed} | {steps[0]['val/success']:.3f} | {steps[-1]['val/success']:.3f} | "
                f"{np.mean(stale) if stale else 0:.2f} | {format(np.mean(ess), '.3f') if ess else '-'} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join([*lines, ""])


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ray", action="store_true", help="training and sampling in processes of their own")
    parser.add_argument("--learning", type=int, nargs="+", help="values of r to run the main job with")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--uncorrected", action="store_true", help="--learning without importance weights")
    options = parser.parse_args()
    print(learning(options) if options.learning else table(measure(options), options))


if __name__ == "__main__":
    main()
