"""Whole runs of the fakes on a clock of ticks, for tests: each sampled token takes one, each training step `training`.

What a run did, and when, is the same every time, so that updates in the middle of a response can be looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from turnwise.config import load
from turnwise.config.convert import to_plain
from turnwise.data import Trajectory
from turnwise.pipeline.run import Pipeline
from turnwise.testing.fakes import FakeLogger
from turnwise.testing.runs import FAKES, written
from turnwise.testing.ticks import run_in_ticks


@frozen
class Ticked:
    """What a run left: the metrics of each step, the trajectories by (step, split), and the weights at its end."""

    metrics: dict[int, dict[str, float]]
    played: dict[tuple[int, str], list[Trajectory]]
    weights: bytes

    @property
    def tokens(self) -> list[Any]:
        """Every sampled token of the training with its version, in the order of episodes and turns."""
        return [
            (step, t.group, t.member, [(turn.response_ids.tolist(), turn.versions.tolist()) for turn in t.turns])
            for (step, split), played in sorted(self.played.items())
            for t in played
            if split == "train"
        ]

    def versions(self, step: int) -> np.ndarray:
        """Of every token that the step trained on."""
        return np.concatenate([turn.versions for t in self.played[step, "train"] for turn in t.turns])


def ticked(
    out: str, *, training: float, way: str = "between_tokens", ratio: int = 1, groups: int = 2, **changes: Any
) -> Ticked:
    """Train, in the current folder. `changes`: further keys, with `__` for a dot."""
    settings = {
        "output_dir": out,
        "max_steps": 4,
        "eval_steps": 0,
        "async_generation_ratio": ratio,
        "weight_update": way if ratio else "between_batches",
        "runtime": {"use": "fake", "update": training},
        "rollout_batch_size": groups * 2,
        "sequence_length": 128,
        "actor_train.training_args.learning_rate": 0.5,
        # One update a step: what it takes is what the training step takes.
        "actor_train.training_args.per_device_train_batch_size": groups * 2,
        "actor_infer.generating_args.max_new_tokens": 12,
        "actor_infer.strategy_args.strategy_config": {"token": 1.0},
        "train_env_manager.num_env_groups": groups,
    }
    path = Path(f"{out}.yaml")
    path.write_text(written(FAKES, settings | {k.replace("__", "."): v for k, v in changes.items()}), encoding="utf-8")
    loaded = load(path)
    run_in_ticks(Pipeline(loaded.config, Path(), to_plain(loaded.config)).run())
    logger = FakeLogger.latest
    assert logger is not None
    last = max((Path(out) / "checkpoints").iterdir())
    return Ticked(logger.metrics, logger.played, (last / "model" / "weights.npy").read_bytes())
