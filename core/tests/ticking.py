"""Whole runs of the fakes on a clock of ticks, for tests: each sampled token takes one, each training step `training`.

What a run did, and when, is the same every time, so that updates in the middle of a response can be looked at."""

from __future__ import annotations

import asyncio
import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen

from turnwise.config import load
from turnwise.config.convert import to_plain
from turnwise.data import Trajectory
from turnwise.pipeline.run import Pipeline
from turnwise.testing.fakes import FakeLogger
from turnwise.testing.runs import FAKES, written
from turnwise.testing.ticks import run_in_ticks


@frozen
class Ticked:
    """What a run left: the metrics of each step, the trajectories by (step, split), the weights at its end, and the
    step at which it began."""

    metrics: dict[int, dict[str, float]]
    played: dict[tuple[int, str], list[Trajectory]]
    weights: bytes
    first: int = 0

    def after(self, killed: Ticked) -> Ticked:
        """This run, which went on from a checkpoint of another, with the steps that were trained before."""
        return evolve(
            self,
            metrics={step: line for step, line in killed.metrics.items() if step < self.first} | self.metrics,
            played={key: played for key, played in killed.played.items() if key[0] < self.first} | self.played,
            first=killed.first,
        )

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
    out: str,
    *,
    training: float,
    way: str = "between_tokens",
    ratio: int = 1,
    groups: int = 2,
    until: float = math.inf,
    **changes: Any,
) -> Ticked:
    """Train, in the current folder. `until`: the tick at which the run is no more. `changes`: further keys, with `__`
    for a dot."""
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
    path = Path(f"{Path(out).name}.yaml")
    path.write_text(written(FAKES, settings | {k.replace("__", "."): v for k, v in changes.items()}), encoding="utf-8")
    loaded = load(path)
    run = Pipeline(loaded.config, Path(), to_plain(loaded.config)).run()
    with contextlib.suppress(TimeoutError):
        # Cancelled, a run saves nothing and says nothing, as one that is killed.
        run_in_ticks(asyncio.wait_for(run, None if math.isinf(until) else until))
    logger = FakeLogger.latest
    assert logger is not None
    saved = sorted((Path(out) / "checkpoints").glob("checkpoint-*"))
    weights = (saved[-1] / "model" / "weights.npy").read_bytes() if saved else b""
    return Ticked(logger.metrics, logger.played, weights, *logger.resumed[-1:])
