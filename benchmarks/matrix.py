"""The same FrozenLake YAML through every pair of sampler and trainer that one machine without a GPU can run, by
changing names only.

    python benchmarks/matrix.py [--steps 100] [--only vllm deepspeed …] [--write]

A run that the same code finished in the work folder is not run again. `--write` puts the table under
benchmarks/results/matrix.md and into docs/engines.md.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "engines.yaml"
SAMPLERS = {"hf": "hf", "vllm": "vllm", "sglang": "{strategy_name: sglang, strategy_config: {python: PYTHON}}"}
ZERO3 = "{zero_optimization: {stage: 3, stage3_param_persistence_threshold: 0}}"  # else so small a model is not sharded
TRAINERS = {
    "torch": ("torch", []),
    "FSDP2, 2 ranks": ("torch", ["actor_train.device_mapping=[0,1]", "vars.accumulation=1"]),
    "DeepSpeed ZeRO-3, 2 ranks": (
        "deepspeed_train",
        [
            "actor_train.device_mapping=[0,1]",
            "vars.accumulation=1",
            f"actor_train.strategy_args.strategy_config={ZERO3}",
        ],
    ),
    "Megatron TP2": (
        "megatron_train",
        [
            "actor_train.device_mapping=[0,1]",
            "actor_train.strategy_args.strategy_config={tensor_model_parallel_size: 2}",
        ],
    ),
}
BEGIN, END = "<!-- matrix: written by benchmarks/matrix.py --write -->", "<!-- end -->"
LIMIT = 1800
"""Seconds after which a run is ended."""
RUNTIMES = {"local": "local", "ray": "{use: ray, device: cpu}"}


def combinations() -> list[tuple[str, str, str]]:
    """(sampler, trainer, runtime): the local runtime has one process a role."""
    return [(s, t, r) for s in SAMPLERS for t in TRAINERS for r in RUNTIMES if r == "ray" or t == "torch"]


def code() -> str:
    """The same for equal sources of Turnwise and an equal YAML: figures of other ones are not mixed into a table."""
    digest = hashlib.sha256(CONFIG.read_bytes())
    for path in sorted([*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/*/src/**/*.py")]):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def run(sampler: str, trainer: str, runtime: str, steps: int, work: Path) -> dict[str, float | str]:
    """One run's figures; `error` holds the last line where it failed."""
    folder = work / "-".join("".join(c for c in part if c.isalnum()) for part in (sampler, trainer, runtime))
    kept = folder / "figures.json"
    if kept.is_file():
        return dict(json.loads(kept.read_text()))
    name, changes = TRAINERS[trainer]
    backend = SAMPLERS[sampler].replace("PYTHON", os.environ.get("TURNWISE_SGLANG_PYTHON", "python"))
    chosen = (
        f"actor_infer.strategy_args={backend}"
        if backend.startswith("{")
        else f"actor_infer.strategy_args.strategy_name={backend}"
    )
    command = [
        *(
            sys.executable,
            "-m",
            "turnwise.cli.main",
            "train",
            str(CONFIG),
            f"output_dir={folder}",
            f"max_steps={steps}",
            f"eval_steps={steps}",
        ),
        *(chosen, f"actor_train.strategy_args.strategy_name={name}", *changes, f"runtime={RUNTIMES[runtime]}"),
    ]
    code, spent = watched(command, folder.with_suffix(".log"))
    if code:
        return {"error": (folder.with_suffix(".log").read_text().strip().splitlines() or ["?"])[-1]}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["correction/log_prob_diff/max"] for line in lines if "correction/log_prob_diff/max" in line]
    figures: dict[str, float | str] = {"success": lines[-1]["val/success"], "gap": max(gaps), "cpu": spent}
    kept.write_text(json.dumps(figures))
    return figures


def watched(command: list[str], log: Path) -> tuple[int, float]:
    """The exit code of `command`, and the CPU seconds of all processes that descended from it (looked at twice a
    second)."""
    log.parent.mkdir(parents=True, exist_ok=True)
    seconds: dict[tuple[int, float], float] = {}
    with log.open("w") as output, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output) as started:
        known: dict[tuple[int, float], psutil.Process] = {}
        deadline = time.monotonic() + LIMIT
        while started.poll() is None:
            if time.monotonic() > deadline:
                started.terminate()
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(started.pid)
                known |= {(p.pid, p.create_time()): p for p in (family, *family.children(recursive=True))}
            for key, process in list(known.items()):
                try:
                    times = process.cpu_times()
                    seconds[key] = times.user + times.system
                except psutil.NoSuchProcess:
                    del known[key]
            time.sleep(0.5)
        return started.returncode, sum(seconds.values())


def table(results: dict[tuple[str, str, str], dict[str, float | str]], steps: int) -> str:
    """The figures as Markdown."""
    lines = [
        "# One YAML, every pair of engines",
        "",
        (
            f"`make matrix`: `examples/engines.yaml`, FrozenLake 3×3 from random weights, {steps} steps of 128"
            f" episodes, one seed: greedy success on 128 levels held out by content. Machine: {os.cpu_count()} cores of"
            f" {platform.machine()}, no GPU, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}. CPU seconds"
            " are those of all processes of the run, start and evaluation included."
        ),
        "",
        "| sampler | trainer | runtime | success | largest log-prob difference, sampler to trainer | CPU, s |",
        "|---|---|---|---:|---:|---:|",
    ]
    for (sampler, trainer, runtime), r in results.items():
        if "error" in r:
            lines.append(f"| {sampler} | {trainer} | {runtime} | failed: {r['error']} | | |")
        else:
            figures = f"{r['success']:.3f} | {r['gap']:.1e} | {r['cpu']:.0f}"
            lines.append(f"| {sampler} | {trainer} | {runtime} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="+", default=[], help="run combinations that name all of these")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "matrix")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.only and options.write:
        parser.error("--write is for the whole table. Fix: leave out --only")
    work, results = options.work / f"{code()}-{options.steps}", {}
    for one in combinations():
        if all(any(word.lower() in part.lower() for part in one) for word in options.only):
            results[one] = run(*one, options.steps, work)
            print(one, results[one], flush=True)
    text = table(results, options.steps)
    print(text)
    if options.write:
        (ROOT / "benchmarks" / "results" / "matrix.md").write_text(text)
        page = ROOT / "docs" / "engines.md"
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(before + BEGIN + "\n" + text.partition("\n\n")[2] + rest[rest.index(END) :])
    sys.exit(any("error" in r for r in results.values()))


if __name__ == "__main__":
    main()
