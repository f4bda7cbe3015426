"""From turns to training rows: prompt and response tokens of a run of turns, masked to what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.data.trajectory import Sample, Trajectory, Turn, int32


def one_row(trajectory: Trajectory) -> list[Sample]:
    """A conversation that only grew, as one row; none if nothing was sampled."""
    sample = sample_of(dict(enumerate(trajectory.turns)))
    return [] if sample is None else [sample]


def row_per_call(trajectory: Trajectory) -> list[Sample]:
    """One row per turn in which a token was sampled."""
    rows = (sample_of({index: turn}) for index, turn in enumerate(trajectory.turns))
    return [row for row in rows if row is not None]


def sample_of(turns: Mapping[int, Turn]) -> Sample | None:
    """One row of these turns (by their index in the trajectory), where prompt and response of each begin the prompt of
    the next.

    The row is the last turn's prompt and response. None if no token was sampled, or if the turns hold no prompt tokens
    (the backend took messages). Expert indices become the column `expert_indices` int32 [L, layers, top_k], −1 on every
    token that the engine did not sample; raises ValueError where a turn's do not fit its sampled tokens.
    """
    if not turns:
        return None
    # The last prompt holds all that came before it, so its row holds every turn.
    last = turns[max(turns)]
    ids = np.concatenate([last.prompt_ids, last.response_ids])
    mask = np.zeros(len(ids), np.bool_)
    owner = np.full(len(ids), -1, np.int32)
    versions = np.full(len(ids), -1, np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    experts: list[tuple[np.ndarray, np.ndarray]] = []
    known = True
    for index, turn in turns.items():
        if not turn.response_mask.any():
            continue
        # Messages went out: without a prompt's ids there is nothing to train on.
        if not len(turn.prompt_ids):
            return None
        place = np.arange(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.response_ids))[turn.response_mask]
        mask[place] = True
        owner[place] = index
        versions[place] = turn.versions[turn.response_mask]
        if turn.logprobs is None:
            known = False
        else:
            logprobs[place] = turn.logprobs[turn.response_mask]
        indices = expert_indices(turn.extras.get("expert_indices"), len(place))
        if indices is not None:
            experts.append((place, indices))
    if not mask.any():
        return None
    columns = {"expert_indices": _aligned(experts, len(ids))} if experts else {}
    return Sample(ids, mask, owner, logprobs if known else None, versions, last.images, columns)


def merged(turns: Sequence[Turn]) -> list[Sample]:
    """The rows of a trajectory's turns, neighbours joined where the prompt and response of one begin the **prompt** of
    the next.

    Images count too: those of the one prompt must come first in the next. What lies between (the observation) is not
    sampled. Anything else starts a new row. Turns without a sampled token give no row and stand in no one's way. Raises
    ValueError as `sample_of` does.
    """
    runs: list[dict[int, Turn]] = []
    last: Turn | None = None
    for index, turn in enumerate(turns):
        if not turn.response_mask.any():
            continue
        if last is not None and begins(last, turn):
            runs[-1][index] = turn
        else:
            runs.append({index: turn})
        last = turn
    rows = (sample_of(run) for run in runs)
    return [row for row in rows if row is not None]


def begins(earlier: Turn, later: Turn) -> bool:
    """Whether prompt and response of `earlier`, images included, are a prefix of the prompt of `later` alone."""
    p, n = len(earlier.prompt_ids), len(earlier.prompt_ids) + len(earlier.response_ids)
    return (
        p > 0
        and n <= len(later.prompt_ids)
        and np.array_equal(later.prompt_ids[:p], earlier.prompt_ids)
        and np.array_equal(later.prompt_ids[p:n], earlier.response_ids)
        and later.images[: len(earlier.images)] == earlier.images
    )


def expert_indices(values: Any, count: int) -> np.ndarray | None:
    """int32 [count, layers, top_k]: which experts served each of `count` sampled tokens. None for none, or an empty
    list of them.

    Raises ValueError for any other number of entries and for another shape.
    """
    if values is None or len(values) == 0:
        return None
    if len(values) != count:
        raise ValueError(f"expert_indices has {len(values)} entries for {count} sampled tokens")
    indices = np.asarray(values)
    if indices.ndim != 3 or indices.dtype.kind not in "iu":
        raise ValueError(
            f"expert_indices is {indices.dtype} {list(indices.shape)}, not integers [tokens][layers][top_k]"
        )
    return int32(indices)


def _aligned(parts: Sequence[tuple[np.ndarray, np.ndarray]], length: int) -> np.ndarray:
    """The expert indices of all turns at their places; −1 elsewhere."""
    shapes = sorted({indices.shape[1:] for _, indices in parts})
    if len(shapes) > 1:
        raise ValueError(
            "expert_indices of one row are of different shapes [layers, top_k]:"
            f" {', '.join(str(list(s)) for s in shapes)}"
        )
    column = np.full((length, *shapes[0]), -1, np.int32)
    for place, indices in parts:
        column[place] = indices
    return column
