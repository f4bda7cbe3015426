"""Whole runs of the command line that play a batch ahead of the trainer, and go on from a checkpoint: what any trainer
keeps."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.testing.runs import LAKE, UNTIMED, written

STEPS, GROUPS, SIZE = 4, 2, 4
TIMEOUT = 280.0
"""Seconds for one run."""


def check_ahead(folder: Path, *plugins: str, way: str = "between_batches", **changes: Any) -> None:
    """Train the tiny FrozenLake with `async_generation_ratio: 1` and `weight_update: way`, then again from its second
    checkpoint: no token is staler than a step, the importance weights are sound, every group is trained once, and
    between batches both runs have the same numbers.

    `changes` by key, a dot written as two underscores. Raises AssertionError."""
    keys: Mapping[str, Any] = {
        "plugins": [*LAKE["plugins"], *plugins],
        "max_steps": STEPS,
        "async_generation_ratio": 1,
        "weight_update": way,
        # Responses that are still on their way when weights come.
        "actor_infer.generating_args.max_new_tokens": 24,
        "sequence_length": 512,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    (folder / "run.yaml").write_text(written(LAKE, keys), encoding="utf-8")
    _train(folder)
    first = _metrics(folder)
    _train(folder, "resume_from_checkpoint=out/checkpoints/checkpoint-000002")
    again = _metrics(folder)
    for lines in (first, again):
        assert [line["step"] for line in lines] == list(range(STEPS))
        stale = [line["async/staleness/max"] for line in lines]
        assert stale[0] == 0 < max(stale) <= 1, stale
        sizes = [line["async/ess"] for line in lines]
        assert all(0 < size <= 1 + 1e-6 for size in sizes), sizes
        assert all(math.isfinite(line["policy/grad_norm"]) for line in lines)
    assert max(line["policy/grad_norm"] for line in first) > 0  # the weights moved
    if way == "between_batches":
        assert [line["async/staleness/max"] for line in first] == [0, 1, 1, 1]
        assert again == first
    assert _trained(folder) == [
        [(step * GROUPS + group, member) for group in range(GROUPS) for member in range(SIZE)] for step in range(STEPS)
    ]


def _train(folder: Path, *overrides: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "turnwise.cli.main", "train", "run.yaml", *overrides],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """Without what time decides."""
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(UNTIMED)} for line in lines]


def _trained(folder: Path) -> list[list[tuple[int, int]]]:
    """(group, member) of every trajectory, by step."""
    steps: list[list[tuple[int, int]]] = [[] for _ in range(STEPS)]
    for line in (folder / "out" / "trajectories" / "train.jsonl").read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        steps[one["step"]].append((one["group"], one["member"]))
    return [sorted(step) for step in steps]
