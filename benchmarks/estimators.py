"""CPU seconds that every advantage estimator takes for 10⁴, 10⁵ and 10⁶ turns.

    python benchmarks/estimators.py [--turns 10000 100000 1000000] [--repeats 3] [--only gigpo] [--states tuple]

Groups of eight trajectories of ten turns, four sampled tokens a turn, one row per turn, twenty states a group: texts,
or as FrozenLake reports them (the level's rows and a position, tuples of texts and numbers). The least of the repeats is
printed, and how many times longer the last batch
takes than the one before it: 10 for ten times the turns is linear.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from turnwise.contracts.estimator import EstimatorContext
from turnwise.data.batch import Batch, Table
from turnwise.plugins import Entry, registry

MEMBERS, TURNS, TOKENS = 8, 10, 4


def synthetic(turns: int, states: str = "text", seed: int = 0) -> Batch:
    """A batch of `turns` turns, written as tables: objects for single turns would take longer than what is measured."""
    draw = np.random.default_rng(seed)
    trajectories = turns // TURNS
    owner = np.repeat(np.arange(trajectories, dtype=np.int64), TURNS)
    group = np.arange(trajectories, dtype=np.int64) // MEMBERS
    reward = draw.choice([0.0, 0.0, 0.0, 0.5, 1.0], turns)
    anchor = np.empty(turns, object)
    places = zip(group[owner].tolist(), draw.integers(0, 20, turns).tolist())
    levels = [tuple(f"{g:04d}"[i % 4] * 4 for i in range(4)) for g in range(trajectories // MEMBERS + 1)]
    anchor[:] = [
        f"a level of group {g}, seen from place {p}" if states == "text" else (levels[g], divmod(p, 4))
        for g, p in places
    ]
    of_turn = np.repeat(np.arange(turns, dtype=np.int64), TOKENS)
    token_rewards = np.zeros(turns * TOKENS)
    token_rewards[TOKENS - 1 :: TOKENS] = reward
    return Batch(
        trajectories=Table(
            {
                "group": group,
                "traj_group_id": group,
                "tag": np.zeros(trajectories, np.int64),
                "scores": np.bincount(owner, weights=reward, minlength=trajectories),
            },
            trajectories,
        ),
        turns=Table({"trajectory": owner, "reward": reward, "anchor": anchor}, turns),
        samples=Table({"trajectory": owner}, turns),
        tokens=Table(
            {
                "response_mask": np.ones(len(of_turn), np.bool_),
                "trajectory": owner[of_turn],
                "turn": of_turn,
                "token_level_rewards": token_rewards,
                "values": draw.standard_normal(len(of_turn)),
            },
            len(of_turn),
        ),
        tags=("A",),
        sampled=np.arange(len(of_turn), dtype=np.int64),
    )


def seconds(entry: Entry, batch: Batch, repeats: int) -> float:
    """The least of `repeats` runs of an estimator with its default options."""
    config = entry.config_class()
    estimator = entry.target()(config() if config else None, EstimatorContext())
    took = []
    for _ in range(repeats):
        began = time.process_time()
        estimator.compute(batch)
        took.append(time.process_time() - began)
    return min(took)


def main() -> None:
    """Print one line per estimator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[10**4, 10**5, 10**6])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--states", choices=["text", "tuple"], default="text")
    parser.add_argument("--only", nargs="*", help="names of estimators")
    arguments = parser.parse_args()
    entries = [e for e in registry().entries("advantage_estimator") if not arguments.only or e.name in arguments.only]
    table: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for turns in arguments.turns:
        batch = synthetic(turns, arguments.states)
        for entry in entries:
            table[entry.name].append(seconds(entry, batch, arguments.repeats))
    print(f"{'estimator':30s}" + "".join(f"{turns:>12,d}" for turns in arguments.turns) + f"{'growth':>10s}")
    for name, took in table.items():
        growth = f"{took[-1] / took[-2]:10.1f}" if len(took) > 1 else ""
        print(f"{name:30s}" + "".join(f"{s:10.4f} s" for s in took) + growth)


if __name__ == "__main__":
    main()
