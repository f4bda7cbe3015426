"""The columnar batch: four linked tables of trajectories, turns, samples and tokens, in (group, member) order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from turnwise.data.trajectory import Sample, Trajectory


class Table(Mapping[str, np.ndarray]):
    """Columns of one length, by name. Immutable: `with_columns` returns a new table that shares the old columns."""

    def __init__(self, columns: Mapping[str, np.ndarray], length: int) -> None:
        for name, column in columns.items():
            if len(column) != length:
                raise ValueError(f"column {name!r} has {len(column)} entries, the table has {length}")
        self._columns = dict(columns)
        self._length = length

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """The number of rows (not of columns)."""
        return self._length

    def __bool__(self) -> bool:
        # `__len__` counts rows, and a table of none is still a table.
        return True

    def with_columns(self, **columns: np.ndarray) -> Table:
        """The table with these columns added or replaced."""
        return Table({**self._columns, **columns}, self._length)


@frozen(eq=False)
class Batch:
    """One pipeline step's data.

    trajectories [N]: `group` int64 (the serial number), `traj_group_id` int64 (the members that are compared: of one
    group and one role; where no trajectory has a role it is the group), `role` (object), `member`, `tag` int64 (index
    into `tags`), `scores` float64, `stop_reason` (object), `success` float64 (NaN: unknown), `turns` int64, `seed`.
    turns [K]: `trajectory` int64, `turn` int64 (index in its trajectory), `reward` float64, `anchor` object.
    samples [S]: `trajectory` int64, `start` int64, `length` int64, `prompt_length` int64.
    tokens [T]: `input_ids` int32, `response_mask` bool, `sample` int64, `trajectory` int64, `turn` int64 (row of the
    turn table, −1 if not sampled), `infer_log_probs` float32 (NaN where unknown), `versions` int32,
    `token_level_rewards` float64; later `old_log_probs`, `ref_log_probs`, `values`, `advantages`, `returns`.
    A turn's reward sits on its last sampled token; a turn without one gives it to the last sampled token before, else
    to the first after. A manager adds token columns of its own by `Sample.columns`; what nobody knows travels untouched
    and reaches the loss by name.
    """

    trajectories: Table
    turns: Table
    samples: Table
    tokens: Table
    tags: tuple[str, ...]
    images: tuple[tuple[np.ndarray, ...], ...] = ()
    sample_images: tuple[tuple[int, ...], ...] = ()
    sampled: np.ndarray = field(factory=lambda: np.zeros(0, np.int64))
    """int64 [R]: indices of the sampled tokens in (trajectory, turn, position) order: the sequence that token recursions run over."""

    def with_tokens(self, **columns: np.ndarray) -> Batch:
        """The batch with these token columns added or replaced."""
        return evolve(self, tokens=self.tokens.with_columns(**columns))

    def with_trajectories(self, **columns: np.ndarray) -> Batch:
        """The batch with these trajectory columns added or replaced."""
        return evolve(self, trajectories=self.trajectories.with_columns(**columns))

    @property
    def has_infer_log_probs(self) -> bool:
        """Whether the sampler gave a log-prob for every sampled token."""
        return not bool(np.isnan(self.tokens["infer_log_probs"][self.sampled]).any())


def build_batch(trajectories: Sequence[Trajectory], samples: Sequence[Sequence[Sample]]) -> Batch:
    """The batch of `trajectories` and, for each, its samples; trajectories are put in (group, member) order, those of
    one episode stay as they are."""
    # Episodes finish in any order: sorted, a step's batch and all that is computed from it do not depend on it.
    order = sorted(range(len(trajectories)), key=lambda i: (trajectories[i].group, trajectories[i].member))
    played = [trajectories[i] for i in order]
    cut = [list(samples[i]) for i in order]
    # In order of appearance, without copies.
    tags = tuple(dict.fromkeys(t.tag for t in played))
    first_turn = np.concatenate([[0], np.cumsum([len(t.turns) for t in played])]).astype(np.int64)
    turns = _turn_table(played)
    rows = [(i, sample) for i, mine in enumerate(cut) for sample in mine]
    tokens, sample_table = _token_tables(rows, first_turn)
    sampled = np.flatnonzero(tokens["response_mask"])
    # The last key of lexsort is the first: by trajectory, then turn, then position.
    keys = (sampled, tokens["turn"][sampled], tokens["trajectory"][sampled])
    sampled = sampled[np.lexsort(keys)]
    tokens = tokens.with_columns(token_level_rewards=_place_rewards(tokens, turns, sampled))
    table = Table(
        {
            "group": np.array([t.group for t in played], np.int64),
            "traj_group_id": _compared(played),
            "role": np.array([t.role for t in played], object),
            "member": np.array([t.member for t in played], np.int64),
            "tag": np.array([tags.index(t.tag) for t in played], np.int64),
            "scores": np.array([t.score for t in played], np.float64),
            "stop_reason": np.array([t.stop_reason for t in played], object),
            "success": np.array([np.nan if t.success is None else float(t.success) for t in played], np.float64),
            "turns": np.diff(first_turn),
            # Python integers: a seed may be larger than int64.
            "seed": np.array([t.seed for t in played], object),
        },
        len(played),
    )
    return Batch(
        trajectories=table,
        turns=turns,
        samples=sample_table,
        tokens=tokens,
        tags=tags,
        images=tuple(t.images for t in played),
        sample_images=tuple(sample.images for _, sample in rows),
        sampled=sampled,
    )


def _compared(played: Sequence[Trajectory]) -> np.ndarray:
    """int64 [N]: the group's serial number, or where trajectories have roles a number for each (group, role), in order
    of appearance."""
    if not any(t.role for t in played):
        return np.array([t.group for t in played], np.int64)
    numbers: dict[tuple[int, str], int] = {}
    return np.array([numbers.setdefault((t.group, t.role), len(numbers)) for t in played], np.int64)


def _turn_table(played: Sequence[Trajectory]) -> Table:
    flat = [(i, k, turn) for i, t in enumerate(played) for k, turn in enumerate(t.turns)]
    anchors = np.empty(len(flat), object)
    # One by one: np.array would make a table of two dimensions of anchors that are arrays or tuples of one length.
    for row, (_, _, turn) in enumerate(flat):
        anchors[row] = turn.anchor
    return Table(
        {
            "trajectory": np.array([i for i, _, _ in flat], np.int64),
            "turn": np.array([k for _, k, _ in flat], np.int64),
            "reward": np.array([turn.reward for _, _, turn in flat], np.float64),
            "anchor": anchors,
        },
        len(flat),
    )


def _token_tables(rows: Sequence[tuple[int, Sample]], first_turn: np.ndarray) -> tuple[Table, Table]:
    lengths = np.array([len(sample.input_ids) for _, sample in rows], np.int64)
    owner = np.array([i for i, _ in rows], np.int64)
    total = int(lengths.sum())

    def joined(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
        return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)

    mask = joined([sample.response_mask for _, sample in rows], np.bool_)
    turn = joined([sample.turn for _, sample in rows], np.int64)
    trajectory = np.repeat(owner, lengths)
    columns = {
        "input_ids": joined([sample.input_ids for _, sample in rows], np.int32),
        "response_mask": mask,
        "sample": np.repeat(np.arange(len(rows), dtype=np.int64), lengths),
        "trajectory": trajectory,
        # A sample's `turn` counts within its trajectory; the column names rows of the turn table.
        "turn": np.where(mask, turn + first_turn[trajectory], -1) if total else turn,
        "infer_log_probs": joined([_logprobs(sample) for _, sample in rows], np.float32),
        "versions": joined([sample.versions for _, sample in rows], np.int32),
    }
    extra = _extra_columns(rows, lengths)
    if taken := sorted(extra.keys() & {*columns, "token_level_rewards"}):
        raise ValueError(
            f"a sample's columns may not be named {', '.join(taken)}: the token table has columns of these names"
        )
    columns |= extra
    starts = np.cumsum(lengths) - lengths
    table = Table(
        {
            "trajectory": owner,
            "start": starts,
            "length": lengths,
            "prompt_length": np.array([sample.prompt_length for _, sample in rows], np.int64),
        },
        len(rows),
    )
    return Table(columns, total), table


def _logprobs(sample: Sample) -> np.ndarray:
    if sample.logprobs is not None:
        return sample.logprobs
    # NaN says "unknown" on sampled tokens alone: elsewhere a sum over the row must stay a number.
    return np.where(sample.response_mask, np.float32(np.nan), np.float32(0))


def _extra_columns(rows: Sequence[tuple[int, Sample]], lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Columns that only some samples carry are filled with −1 (integers), NaN (floats), False or 0 (bool, unsigned) in
    the others."""
    known = {name: column for _, sample in rows for name, column in sample.columns.items()}
    out = {}
    for name, example in known.items():
        fill = {"i": -1, "b": False, "u": 0}.get(example.dtype.kind, np.nan)
        parts = [
            sample.columns.get(name, np.full((int(n), *example.shape[1:]), fill, example.dtype))
            for (_, sample), n in zip(rows, lengths)
        ]
        out[name] = np.concatenate(parts)
    return out


def _place_rewards(tokens: Table, turns: Table, sampled: np.ndarray) -> np.ndarray:
    """Per-token rewards: each turn's reward on a sampled token of its trajectory, by the rule in `Batch`."""
    rewards = np.zeros(len(tokens), np.float64)
    if not len(sampled) or not len(turns):
        return rewards
    owner, turn_of = tokens["trajectory"][sampled], tokens["turn"][sampled]
    # Turn rows ascend along `sampled`.
    before = np.searchsorted(turn_of, np.arange(len(turns)), side="right") - 1
    at = np.maximum(before, 0)
    # The neighbours along `sampled` may belong to another trajectory, which must not get the reward.
    earlier = (before >= 0) & (owner[at] == turns["trajectory"])
    after = np.minimum(before + 1, len(sampled) - 1)
    later = (before + 1 < len(sampled)) & (owner[after] == turns["trajectory"])
    place = np.where(earlier, at, after)
    usable = earlier | later
    # add.at, not `+=`: two turns may give their rewards to the same token, and `+=` would keep one of them.
    np.add.at(rewards, sampled[place[usable]], turns["reward"][usable])
    return rewards
