"""Four runs recorded with the sources of one commit and of this checkout, which must agree to the last bit.

`python benchmarks/recorded.py --against COMMIT [RUN …]`: metrics (but time/, tps/ and system/), exported weights and
trajectories of every run are compared; the exit status is 1 where one differs. For a change of structure that must not
change what a run computes. The run `ray` needs Ray in this interpreter and is left out, with a word, where it is not
installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = "examples/frozen_lake.yaml"
SHORT = (
    "output_dir=out",
    "render_save_dir=null",
    "track_with=[jsonl]",
    "max_steps=4",
    "eval_steps=2",
    "save_steps=2",
    "actor_train.training_args.warmup_steps=1",
    "baselines=[random]",
    "rollout_batch_size=64",
    "val_batch_size=32",
    "train_env_manager.num_env_groups=4",
    "val_env_manager.num_env_groups=32",
    "actor_train.training_args.per_device_train_batch_size=16",
)

CRITIC = "critic={training_args: {learning_rate: 0.003, per_device_train_batch_size: 16}, model_args: {dtype: fp32}}"
PACKED = ("actor_train.use_sequence_packing=true", "actor_train.use_dynamic_batching_in_infer=true")
BUDGET = "actor_train.max_tokens_per_microbatch_in_infer=8192"
PLUGINS = "[turnwise-gymnasium, turnwise-managers, turnwise-hf, turnwise-torch, turnwise-losses, turnwise-batching, {}]"
RUNS: dict[str, tuple[str, ...]] = {
    "main": SHORT,
    "gae": (
        *SHORT,
        f"plugins={PLUGINS.format('turnwise-gae')}",
        "adv_estimator=gae",
        "gamma=0.99",
        "reward_normalization=null",
        CRITIC,
    ),
    "lora": (
        *SHORT,
        *PACKED,
        BUDGET,
        "actor_train.model_args.lora_rank=4",
        "actor_train.model_args.lora_target=all-linear",
        "kl_loss_coef=0.1",
    ),
    "ray": (
        *SHORT,
        f"plugins={PLUGINS.format('turnwise-ray, turnwise-grpo')}",
        "runtime={use: ray, device: cpu, object_store_mb: 100}",
        "actor_train.device_mapping=[0,1]",
        "actor_train.training_args.per_device_train_batch_size=8",
    ),
}
"""Name → overrides of the main job's YAML."""
UNREPEATABLE = ("time/", "tps/", "system/")


def record(tree: Path, name: str, folder: Path) -> dict[str, str]:
    """Train run `name` with the sources of `tree`: what was written → its digest."""
    sources = [tree / "core/src", *sorted(tree.glob("plugins/*/*/src"))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, sources)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "turnwise.cli.main", "train", str(ROOT / EXAMPLE), *RUNS[name]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"run {name} of {tree} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return dict(_digests(folder / "out"))


def _digests(out: Path) -> Iterator[tuple[str, str]]:
    for line in (out / "metrics.jsonl").read_text().splitlines():
        values = {key: value for key, value in json.loads(line).items() if not key.startswith(UNREPEATABLE)}
        for key, value in values.items():
            yield f"metrics of step {values['step']}: {key}", repr(value)
    for path in sorted(out.rglob("trajectories/*.jsonl")):
        yield str(path.relative_to(out)), hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(out.rglob("*.safetensors")):  # the tensors: the order of a file's metadata is that of a hash
        for key, tensor in load_file(path).items():
            yield f"{path.relative_to(out)}: {key}", hashlib.sha256(tensor.tobytes()).hexdigest()


def compare(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """One line for everything that differs; metrics that are new here are no difference."""
    gone = [f"{key}: gone" for key in before.keys() - now.keys()]
    changed = [f"{key}: {before[key]} → {now[key]}" for key in before.keys() & now.keys() if before[key] != now[key]]
    return sorted(gone + changed, key=lambda line: (not line.startswith("metrics"), line))  # what began it stands first


def main() -> int:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=", ".join(RUNS))
    arguments = parser.parse_args()
    differing = 0
    with tempfile.TemporaryDirectory(prefix="turnwise-recorded-") as place:
        tree = Path(place) / "tree"
        subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, arguments.against], check=True
        )
        try:
            for name in arguments.runs or RUNS:
                if name == "ray" and importlib.util.find_spec("ray") is None:
                    print("ray: left out, Ray is not installed in this interpreter")
                    continue
                before, now = (
                    record(tree, name, Path(place) / "before" / name),
                    record(ROOT, name, Path(place) / "now" / name),
                )
                lines = compare(before, now)
                differing += bool(lines)
                print(
                    f"{name}:"
                    f" {f'{len(lines)} differences' if lines else f'{len(before)} values and files agree to the last bit'}"
                )
                print("".join(f"  {line}\n" for line in lines[:20]), end="", flush=True)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
