"""The main job with three seeds, one after the other, and its table: success on held-out maps, wall and CPU seconds, baselines beside it.

    python benchmarks/study.py [--seeds 0 1 2] [--write]

`--write` puts the table under benchmarks/results/frozen_lake.md and the first seed's curves under docs/images/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "frozen_lake.yaml"


def run(seed: int, folder: Path) -> dict[str, float]:
    """Train with one seed; its final evaluation, wall and CPU seconds."""
    began, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "turnwise.cli.main", "train", str(CONFIG), f"seed={seed}", f"output_dir={folder}"]
    subprocess.run(command, check=True, cwd=ROOT)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    return {
        "before": first["val/success"],
        "after": last["val/success"],
        "score": last["val/score/mean"],
        "steps": float(last["step"]),
        "wall": time.perf_counter() - began,
        "cpu": used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime,
    }


def baselines(folder: Path) -> dict[str, float]:
    """The success of the players without a model, from the run's report."""
    rows = [line.strip("| ").split("|") for line in (folder / "report.md").read_text().splitlines() if line.startswith("| ")]
    column = next(i for i, name in enumerate(rows[0]) if name.strip().endswith("success"))
    return {row[0].strip(): float(row[column]) for row in rows[1:] if not row[0].startswith("model")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folders = {seed: Path(temporary) / f"seed-{seed}" for seed in options.seeds}
        results = {seed: run(seed, folder) for seed, folder in folders.items()}
        players = baselines(folders[options.seeds[0]])
        if options.write:
            images = ROOT / "docs" / "images"
            images.mkdir(parents=True, exist_ok=True)
            shutil.copy(folders[options.seeds[0]] / "curves.png", images / "frozen_lake.png")
    text = table(results, players)
    print(text)
    if options.write:
        target = ROOT / "benchmarks" / "results" / "frozen_lake.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def table(results: dict[int, dict[str, float]], players: dict[str, float]) -> str:
    """The results as Markdown."""
    lines = [
        "# FrozenLake 4×4 from random weights",
        "",
        "`python benchmarks/study.py --write`: greedy success on 512 maps held out by content (split `test`), random start and goal, eight turns.",
        f"Machine: {os.cpu_count()} cores of {platform.machine()}, no GPU, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}, "
        "runs one after the other.",
        "",
        "| seed | steps | success before | success after | score after | wall s | CPU s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for seed, r in results.items():
        lines.append(f"| {seed} | {r['steps']:.0f} | {r['before']:.3f} | {r['after']:.3f} | {r['score']:.3f} | {r['wall']:.0f} | {r['cpu']:.0f} |")
    lines += ["", f"Median success of {len(results)} seeds: {statistics.median(r['after'] for r in results.values()):.3f}.", ""]
    lines += ["| player without a model | success |", "|---|---:|", *(f"| {name} | {value:.3f} |" for name, value in players.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
