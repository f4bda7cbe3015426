"""What learns: FrozenLake with every cut and every estimator, three seeds each, and Sokoban; or the main job with three
seeds.

    python benchmarks/study.py [--work FOLDER] [--seeds 0 1 2] [--only PART …] [--list] [--write]
    python benchmarks/study.py --main-job [--seeds 0 1 2] [--write]

The study's finished runs are lines of FOLDER/results.jsonl and are not run again; a run that fails is reported and does not
stop the others. `--write` puts what is finished into benchmarks/results/ and docs/: study.md, sokoban.md, learning.md's
tables and pictures, or frozen_lake.md and the first seed's curves.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import study_pages as pages
import study_runs as study

CONFIG = study.EXAMPLES / "frozen_lake.yaml"
RESULTS = study.ROOT / "benchmarks" / "results"
IMAGES = study.ROOT / "docs" / "images"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=study.ROOT / "runs" / "study", help="folder of the runs and of results.jsonl"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--only", nargs="+", default=[], help="runs whose name holds one of these, as merged-gae or sokoban"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names of the runs and which are finished, run nothing"
    )
    parser.add_argument("--main-job", action="store_true", help="the seeds of examples/frozen_lake.yaml instead")
    parser.add_argument("--write", action="store_true", help="write the tables and pictures that are committed")
    options = parser.parse_args()
    return main_job(options.seeds, options.write) if options.main_job else whole_study(options)


def whole_study(options: argparse.Namespace) -> int:
    """Run what is not finished, print a line a run, and write the pages; 1 if a run failed."""
    runs = [
        run
        for run in study.all_runs(options.seeds)
        if not options.only or any(part in run.name for part in options.only)
    ]
    if options.list:
        known = study.finished(options.work)
        print("\n".join(f"{'finished' if (run.name, run.digest) in known else '-':9}{run.name}" for run in runs))
        return 0
    lines, failed = [], []
    for run, line in study.play_all(runs, options.work):
        if line is None:
            failed.append(run.name)
            print(f"{run.name:45} failed: {options.work / run.name}.log", flush=True)
            continue
        lines.append(line)
        before, after = line["evals"][0][1], line["evals"][-1][1]
        print(
            f"{run.name:45} held-out success {before:.3f} → {after:.3f}, {line['cpu']:.0f} CPU s, {line['wall']:.0f} s",
            flush=True,
        )
    if options.write and lines:
        pages.write(lines, RESULTS, IMAGES)
    return 1 if failed else 0


# ---- the main job


def train(seed: int, folder: Path) -> dict[str, float]:
    """Train the main job with one seed; its final evaluation, wall and CPU seconds."""
    began, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "turnwise.cli.main", "train", str(CONFIG), f"seed={seed}", f"output_dir={folder}"]
    subprocess.run(command, check=True, cwd=study.ROOT)
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


def main_job(seeds: list[int], write: bool) -> int:
    """The main job's seeds one after the other, and its table."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = {seed: Path(temporary) / f"seed-{seed}" for seed in seeds}
        results = {seed: train(seed, folder) for seed, folder in folders.items()}
        text = table(results, study.players(folders[seeds[0]] / "report.md"))
        print(text)
        if write:
            IMAGES.mkdir(parents=True, exist_ok=True)
            shutil.copy(folders[seeds[0]] / "curves.png", IMAGES / "frozen_lake.png")
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / "frozen_lake.md").write_text(text)
    return 0


def table(results: dict[int, dict[str, float]], players: dict[str, float]) -> str:
    """The main job's results as Markdown."""
    lines = [
        "# FrozenLake 4×4 from random weights",
        "",
        (
            "`python benchmarks/study.py --main-job --write`: greedy success on 512 maps held out by content (split"
            " `test`), random start and goal, eight turns."
        ),
        f"Machine: {study.machine()}, no GPU, runs one after the other.",
        "",
        "| seed | steps | success before | success after | score after | wall s | CPU s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for seed, r in results.items():
        lines.append(
            f"| {seed} | {r['steps']:.0f} | {r['before']:.3f} | {r['after']:.3f} | {r['score']:.3f} | {r['wall']:.0f} |"
            f" {r['cpu']:.0f} |"
        )
    lines += [
        "",
        f"Median success of {len(results)} seeds: {statistics.median(r['after'] for r in results.values()):.3f}.",
        "",
    ]
    lines += [
        "| player without a model | success |",
        "|---|---:|",
        *(f"| {name} | {value:.3f} |" for name, value in players.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
