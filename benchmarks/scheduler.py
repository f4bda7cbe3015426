"""What the scheduler costs: CPU time a turn with a backend and an inline environment that do nothing. `python
benchmarks/scheduler.py`"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import numpy as np

from turnwise.contracts.env_manager import Episode, Limits, Sampler
from turnwise.contracts.inference import Request
from turnwise.contracts.rollout import RolloutSettings, TagPlan
from turnwise.data import Generation, Sample, Trajectory
from turnwise.rollout import Scheduler

GROUP_SIZE = 8
GOAL = 100.0


class NullEnvironment:
    """Answers at once and never ends by itself."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, False, False, {}


class NullManager:
    """Plays `max_turns` turns and keeps none: what managers cost is not measured here."""

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        ids = np.zeros(1, np.int32)
        await episode.environment.reset()
        for turn in range(episode.limits.max_turns):
            generation = await sampler.generate(turn=turn, ids=ids, max_new_tokens=1)
            await episode.environment.step(generation.text)
        return Trajectory(episode.tag, episode.group, episode.member, episode.seed, (), "turns")

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        return []


class NullBackend:
    """Answers in the next round of the event loop, so that all episodes are in play at once."""

    input = "ids"
    generation = Generation("", None, None, None, "stop")

    async def generate(self, request: Request) -> Generation:
        await asyncio.sleep(0)
        return self.generation

    def live(self, episodes: int) -> None:
        pass


async def measure(environments: int, turns: int) -> float:
    """CPU microseconds a turn, for one batch after a batch that builds the environments."""
    limits = Limits(sequence_length=8, max_new_tokens=1, max_tokens_per_step=1, max_turns=turns)
    plan = TagPlan(
        "null", NullEnvironment, NullManager(), limits, environments // GROUP_SIZE, GROUP_SIZE, step="inline"
    )
    scheduler = Scheduler([plan], RolloutSettings(seed=0), NullBackend(), None)  # type: ignore[arg-type]
    await scheduler.next_batch(0, version=0)
    start = time.process_time()
    await scheduler.next_batch(1, version=1)
    spent = time.process_time() - start
    await scheduler.close()
    return spent / (environments * turns) * 1e6


def main() -> None:
    """Print the table; the exit status is 1 where a row misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"{'environments':>12}  {'turns':>8}  {'µs CPU a turn (median)':>22}  {'goal':>6}")
    costs = []
    for environments in options.environments:
        costs.append(
            float(np.median([asyncio.run(measure(environments, options.turns)) for _ in range(options.repeats)]))
        )
        print(
            f"{environments:>12}  {environments * options.turns:>8}  {costs[-1]:>22.1f}  {'< ' + format(GOAL, 'g'):>6}"
        )
    print(f"last ÷ first: {costs[-1] / costs[0]:.2f} (1 is linear)")
    raise SystemExit(max(costs) >= GOAL)


if __name__ == "__main__":
    main()
