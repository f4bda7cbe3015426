"""Random trajectories, and the same trajectory cut into training rows in two ways, for contract tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from turnwise.contracts.env_manager import ManagerContext
from turnwise.data.batch import Batch, build_batch
from turnwise.data.rows import Rows, rows_of
from turnwise.data.trajectory import Sample, Trajectory, Turn, float32, int32
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
