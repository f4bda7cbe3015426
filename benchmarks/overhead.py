"""Share of wall time that a training run spends outside model forward, backward, optimizer step and environment steps.

    python benchmarks/overhead.py [--steps 4] [--hidden 256] [--layers 4]

Prints one line for the tiny model of the main job and one for a larger one, measured in the same run. The first step
(warm-up) is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from turnwise.config.loader import load
from turnwise.pipeline.loop import Loop
from turnwise.pipeline.run import Pipeline
from turnwise_gymnasium.frozen_lake import FrozenLake
from turnwise_torch import strategy
from turnwise_torch.optimizer import MasterAdamW

CONFIG = Path(__file__).resolve().parent.parent / "examples" / "frozen_lake.yaml"


class Clock:
    """Wall time during which at least one measured call was under way, on any thread."""

    def __init__(self) -> None:
        self._lock, self._inside, self._since = threading.Lock(), 0, 0.0
        self.total = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, measured."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if self._inside == 0:
                    self._since = time.perf_counter()
                self._inside += 1
            try:
                return call(*args, **kwargs)
            finally:
                with self._lock:
                    self._inside -= 1
                    if self._inside == 0:
                        self.total += time.perf_counter() - self._since

        return measured


@contextlib.contextmanager
def patched(clock: Clock) -> Iterator[None]:
    """Measure forward (log-probs and entropy of the head included), backward, optimizer step and the environment's step
    and reset."""
    targets = [
        (torch.nn.Module, "__call__"),
        (strategy, "token_log_probs"),
        (torch.Tensor, "backward"),
        (MasterAdamW, "step"),
        (MasterAdamW, "clip"),
        (FrozenLake, "step"),
        (FrozenLake, "reset"),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name in targets]
    for owner, name, call in before:
        setattr(owner, name, clock.around(call))
    try:
        yield
    finally:
        for owner, name, call in before:
            setattr(owner, name, call)


def measure(steps: int, recipe: str) -> tuple[float, float]:
    """(wall seconds, seconds outside) of `steps` steps after the first."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"max_steps={steps + 1}",
            "actor_train.training_args.warmup_steps=0",
            "eval_steps=0",
            f"output_dir={folder}",
            "render_save_dir=null",
            "baselines=[]",
            "track_with=[jsonl]",
        ]
        loaded = load(CONFIG, [*overrides, *recipe.split()])
        pipeline = Pipeline(loaded.config, CONFIG.parent, {})
        clock, marks = Clock(), list[tuple[float, float]]()
        log = Loop._log

        def watched(loop: Loop, number: int, values: dict[str, float]) -> None:
            if number in (0, steps):  # the end of the first step, and of the last
                marks.append((time.perf_counter(), clock.total))
            log(loop, number, values)

        with patched(clock), mock.patch.object(Loop, "_log", watched):
            asyncio.run(pipeline.run())
    (t0, c0), (t1, c1) = marks
    return t1 - t0, (t1 - t0) - (c1 - c0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    larger = f"pretrain.recipe.hidden_size={options.hidden} pretrain.recipe.num_layers={options.layers}"
    print(f"{'model':<28}{'wall s':>9}{'outside s':>11}{'share':>8}")
    for name, recipe in (("2 layers × 64", ""), (f"{options.layers} layers × {options.hidden}", larger)):
        wall, outside = measure(options.steps, recipe)
        print(f"{name:<28}{wall:>9.2f}{outside:>11.2f}{outside / wall:>8.1%}")


if __name__ == "__main__":
    main()
