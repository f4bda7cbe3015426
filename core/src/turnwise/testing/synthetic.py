"""Trajectories for tests: random ones, the same one cut into training rows in two ways, and ones that a test draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from turnwise.contracts.env_manager import ManagerContext
from turnwise.data.batch import Batch, build_batch
from turnwise.data.rows import Rows, rows_of
from turnwise.data.trajectory import Sample, StopReason, Trajectory, Turn, float32, int32
from turnwise.testing.fakes import FakeEnvManager

Cut = Callable[[Trajectory], list[Sample]]


def played(
    group: int,
    member: int,
    turns: int = 3,
    seed: int = 0,
    vocabulary: int = 64,
    rewards: Sequence[float] = (0.0, 0.5, 1.0, -0.3),
) -> Trajectory:
    """A trajectory of `turns` turns: prompts that continue one another, one to four sampled tokens a turn (the second
    turn of every third trajectory has none), an appended end token now and then, rewards and anchors drawn from a
    few."""
    # By its own numbers, so that a trajectory is the same however many others are made.
    draw = np.random.default_rng([seed, group, member])
    prompt = int32(draw.integers(1, vocabulary, 3))
    made: list[Turn] = []
    for k in range(turns):
        # What estimators stumble over: a turn without sampled tokens between others.
        sampled = 0 if k == 1 and (group + member) % 3 == 2 else int(draw.integers(1, 5))
        mask = np.array([True] * sampled + [False] * int(draw.integers(2)), np.bool_)
        ids = int32(draw.integers(1, vocabulary, len(mask)))
        made.append(
            Turn(
                prompt_ids=prompt,
                response_ids=ids,
                response_mask=mask,
                logprobs=float32(np.where(mask, -draw.random(len(mask)), 0)),
                versions=int32(np.where(mask, 0, -1)),
                reward=float(draw.choice(rewards)),
                anchor=int(draw.integers(3)),
                text="text",
                action="text",
            )
        )
        # Two tokens of an observation, so that turns do not touch.
        prompt = np.concatenate([prompt, ids, int32(draw.integers(1, vocabulary, 2))])
    success = bool(draw.integers(2))
    return Trajectory("synthetic", group, member, 1000 + group, tuple(made), "terminated", success)


def trajectories(
    groups: int = 4,
    members: int = 3,
    seed: int = 0,
    vocabulary: int = 64,
    rewards: Sequence[float] = (0.0, 0.5, 1.0, -0.3),
) -> list[Trajectory]:
    """Groups of trajectories of one to four turns; the last member of the last group has no turn at all when there are
    several."""
    made = []
    for group in range(groups):
        for member in range(members):
            empty = members > 1 and (group, member) == (groups - 1, members - 1)
            made.append(played(group, member, 0 if empty else 1 + (group + 2 * member) % 4, seed, vocabulary, rewards))
    return made


def one_row(trajectory: Trajectory) -> list[Sample]:
    """The trajectory as one row."""
    return FakeEnvManager(None, ManagerContext()).samples(trajectory)


def row_per_turn(trajectory: Trajectory) -> list[Sample]:
    """One row for every turn that sampled a token."""
    rows = []
    for k, turn in enumerate(trajectory.turns):
        if not turn.response_mask.any():
            continue
        before = np.zeros(len(turn.prompt_ids))
        mask = np.concatenate([before, turn.response_mask]).astype(np.bool_)
        logprobs = float32(np.concatenate([before, turn.logprobs])) if turn.logprobs is not None else None
        versions = int32(np.concatenate([before - 1, turn.versions]))
        rows.append(
            Sample(
                np.concatenate([turn.prompt_ids, turn.response_ids]),
                mask,
                int32(np.where(mask, k, -1)),
                logprobs,
                versions,
            )
        )
    return rows


def batch_of(made: Sequence[Trajectory], cut: Cut = one_row) -> Batch:
    """The batch of trajectories, cut into rows."""
    return build_batch(made, [cut(trajectory) for trajectory in made])


@frozen
class Sketch:
    """A trajectory drawn by what estimators read: its group, and per turn the reward, the number of sampled tokens and
    the anchor (the turn's number where it is left out)."""

    group: int
    turns: Sequence[tuple[float, int] | tuple[float, int, Any]]
    member: int | None = None
    stop: StopReason = "terminated"

    @property
    def score(self) -> float:
        """The sum of the rewards."""
        return sum(turn[0] for turn in self.turns)


def sketched(drawn: Sequence[Sketch], cut: Callable[[int, int], bool] = lambda i, k: False) -> Batch:
    """The batch of sketches, whose members are their positions where they name none. A new row begins at turn k > 0 of
    sketch i where `cut(i, k)`; tokens that were not sampled stand before, between and after the turns. A trajectory
    that sampled nothing has no row."""
    made, samples = [], []
    none = np.zeros(0, np.int32)
    for i, one in enumerate(drawn):
        turns = tuple(
            Turn(none, none, np.zeros(0, np.bool_), None, none, reward, anchor[0] if anchor else k)
            for k, (reward, _, *anchor) in enumerate(one.turns)
        )
        made.append(Trajectory("A", one.group, i if one.member is None else one.member, 0, turns, one.stop))
        # −1: not sampled; a number: the turn that sampled the token.
        rows: list[list[int]] = [[-1]]
        for k, (_, count, *_) in enumerate(one.turns):
            if k and cut(i, k):
                rows.append([-1, -1])
            rows[-1] += [k] * count + [-1]
        samples.append(
            [
                Sample(np.zeros(len(r)), np.array(r) >= 0, np.array(r), None, np.zeros(len(r)))
                for r in rows
                if max(r) >= 0
            ]
        )
    return build_batch(made, samples)


def training_rows(groups: int = 2, seed: int = 0, vocabulary: int = 64) -> Rows:
    """Rows of different lengths as an update carries them: advantage 1 and coef 1/R on every one of the R sampled
    tokens."""
    rows = rows_of(batch_of(trajectories(groups, 3, seed, vocabulary), row_per_turn))
    count = int(rows.response_mask.sum())
    columns = {
        "coef": np.full(count, 1 / count),
        "weight": np.ones(count),
        "advantages": np.ones(count),
        "old_log_probs": np.full(count, np.nan),
    }
    return Rows(rows.input_ids, rows.offsets, rows.response_mask, {**rows.columns, **columns})


def picture(seed: int, height: int, width: int) -> np.ndarray:
    """A random image, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
