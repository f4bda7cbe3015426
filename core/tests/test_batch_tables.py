"""The tables that build_batch makes: links, order, and where rewards are placed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data import Sample, Table, Trajectory, Turn, build_batch

NO_TOKENS = np.zeros(0, np.int32)


def turn(reward: float, anchor: Any = None) -> Turn:
    return Turn(NO_TOKENS, NO_TOKENS, np.zeros(0, np.bool_), None, NO_TOKENS, reward, anchor)


def trajectory(
    group: int, member: int, rewards: list[float], tag: str = "A", success: bool | None = None
) -> Trajectory:
    return Trajectory(
        tag,
        group,
        member,
        10 * group + member,
        tuple(turn(r, f"s{k}") for k, r in enumerate(rewards)),
        "terminated",
        success,
    )


def sample(turns: list[int], logprobs: bool = True, columns: dict[str, np.ndarray] | None = None) -> Sample:
    """One token per entry of `turns`: sampled in that turn, or (−1) not sampled."""
    which = np.array(turns, np.int32)
    mask = which >= 0
    probs = np.where(mask, -0.5, 0.0).astype(np.float32) if logprobs else None
    return Sample(
        np.arange(100, 100 + len(turns), dtype=np.int32),
        mask,
        which,
        probs,
        np.where(mask, 3, -1),
        columns=columns or {},
    )


def test_trajectories_stand_in_group_and_member_order_and_everything_is_linked() -> None:
    played = [
        trajectory(1, 0, [1.0], tag="B", success=True),
        trajectory(0, 1, [2.0, 3.0]),
        trajectory(0, 0, [4.0], success=False),
    ]
    batch = build_batch(played, [[sample([-1, 0])], [sample([-1, 0]), sample([-1, -1, 1, 1])], [sample([-1, 0, -1])]])
    table = batch.trajectories
    assert table["group"].tolist() == [0, 0, 1]
    assert table["traj_group_id"].tolist() == [0, 0, 1]
    assert table["member"].tolist() == [0, 1, 0]
    assert batch.tags == ("A", "B")
    assert table["tag"].tolist() == [0, 0, 1]
    assert table["scores"].tolist() == [4, 5, 1]
    assert table["turns"].tolist() == [1, 2, 1]
    assert table["seed"].tolist() == [0, 1, 10]
    assert np.array_equal(table["success"], [0.0, np.nan, 1.0], equal_nan=True)
    assert batch.turns["trajectory"].tolist() == [0, 1, 1, 2]
    assert batch.turns["turn"].tolist() == [0, 0, 1, 0]
    assert batch.turns["reward"].tolist() == [4, 2, 3, 1]
    assert batch.turns["anchor"].tolist() == ["s0", "s0", "s1", "s0"]
    assert batch.samples["trajectory"].tolist() == [0, 1, 1, 2]
    assert batch.samples["start"].tolist() == [0, 3, 5, 9]
    assert batch.samples["length"].tolist() == [3, 2, 4, 2]
    assert batch.samples["prompt_length"].tolist() == [1, 1, 2, 1]
    tokens = batch.tokens
    assert tokens["input_ids"].tolist() == [100, 101, 102, 100, 101, 100, 101, 102, 103, 100, 101]
    assert tokens["sample"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3]
    assert tokens["trajectory"].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2]
    assert tokens["turn"].tolist() == [-1, 0, -1, -1, 1, -1, -1, 2, 2, -1, 3]
    assert tokens["versions"].tolist() == [-1, 3, -1, -1, 3, -1, -1, 3, 3, -1, 3]
    assert batch.sampled.tolist() == [1, 4, 7, 8, 10]
    assert tokens["token_level_rewards"].tolist() == [0, 4, 0, 0, 2, 0, 0, 0, 3, 0, 1]
    dtypes = {name: tokens[name].dtype for name in tokens}
    assert dtypes == {
        "input_ids": np.int32,
        "response_mask": np.bool_,
        "sample": np.int64,
        "trajectory": np.int64,
        "turn": np.int64,
        "infer_log_probs": np.float32,
        "versions": np.int32,
        "token_level_rewards": np.float64,
    }


def test_sampled_follows_turns_and_not_the_order_of_the_rows() -> None:
    batch = build_batch([trajectory(0, 0, [1.0, 2.0])], [[sample([-1, 1]), sample([-1, 0])]])
    assert batch.sampled.tolist() == [3, 1]
    assert batch.tokens["token_level_rewards"].tolist() == [0, 2, 0, 1]


@pytest.mark.parametrize(
    ("rewards", "rows", "expected"),
    [
        (
            [0.5, 1.0, 2.0],
            [[-1, 0, 0, -1, 2]],
            [0, 0, 1.5, 0, 2.0],
        ),  # a turn without tokens: to the last sampled before
        (
            [0.5, 1.0, 2.0],
            [[-1, 2, 2]],
            [0, 1.5, 2.0],
        ),  # none before: to the first sampled after, which need not be the turn's last
        ([0.5, 1.0], [[-1, -1]], [0, 0]),  # nothing sampled: it counts in the score only
        ([0.5, 1.0], [[-1, 0, -1, -1], [-1, -1]], [0, 1.5, 0, 0, 0, 0]),
    ],
)
def test_where_a_turns_reward_is_placed(rewards: list[float], rows: list[list[int]], expected: list[float]) -> None:
    neighbours = [trajectory(0, 0, [7.0]), trajectory(0, 1, rewards), trajectory(0, 2, [9.0])]
    batch = build_batch(neighbours, [[sample([-1, 0])], [sample(r) for r in rows], [sample([-1, 0])]])
    assert batch.tokens["token_level_rewards"].tolist() == [0, 7, *expected, 0, 9]


def slow_places(rewards: list[float], counts: list[int]) -> list[float]:
    """Rewards on a trajectory's sampled tokens, one turn after the other."""
    tokens = [k for k, n in enumerate(counts) for _ in range(n)]
    out = [0.0] * len(tokens)
    for k, reward in enumerate(rewards):
        until = [i for i, t in enumerate(tokens) if t <= k]
        after = [i for i, t in enumerate(tokens) if t > k]
        if until:
            out[until[-1]] += reward
        elif after:
            out[after[0]] += reward
    return out


@given(
    st.lists(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3)), max_size=5), max_size=5),
    st.randoms(use_true_random=False),
)
def test_placement_equals_the_loop_whatever_the_rows_and_loses_no_reward(
    played: list[list[tuple[int, int]]], random: Any
) -> None:
    trajectories = [trajectory(0, i, [float(r) for r, _ in turns]) for i, turns in enumerate(played)]
    rows = []
    for turns in played:
        runs: list[list[int]] = [[-1]]
        for k, (_, n) in enumerate(turns):
            if random.random() < 0.5:
                runs.append([-1])
            runs[-1] += [k] * n + [-1]
        rows.append([sample(run) for run in runs])
    batch = build_batch(trajectories, rows)
    expected = [x for turns in played for x in slow_places([float(r) for r, _ in turns], [n for _, n in turns])]
    assert batch.tokens["token_level_rewards"][batch.sampled].tolist() == expected
    assert not batch.tokens["token_level_rewards"][~batch.tokens["response_mask"]].any()
    for i, turns in enumerate(played):
        if any(n for _, n in turns):
            assert batch.tokens["token_level_rewards"][batch.tokens["trajectory"] == i].sum() == sum(
                r for r, _ in turns
            )


@given(st.permutations(range(6)))
def test_the_order_in_which_trajectories_arrive_does_not_matter(order: list[int]) -> None:
    played = [(trajectory(i // 2, i % 2, [float(i), 1.0]), [sample([-1, 0]), sample([-1, 1, -1])]) for i in range(6)]
    one, other = build_batch(*zip(*played)), build_batch(*zip(*[played[i] for i in order]))
    for table in ("trajectories", "turns", "samples", "tokens"):
        for name, column in getattr(one, table).items():
            np.testing.assert_array_equal(column, getattr(other, table)[name])
    assert np.array_equal(one.sampled, other.sampled)


def test_trajectories_of_zero_samples_and_of_zero_turns_are_rows_of_the_first_table() -> None:
    batch = build_batch(
        [trajectory(0, 0, []), trajectory(0, 1, [2.0]), trajectory(0, 2, [1.0])], [[], [], [sample([-1, 0])]]
    )
    assert batch.trajectories["scores"].tolist() == [0, 2, 1]
    assert batch.trajectories["turns"].tolist() == [0, 1, 1]
    assert batch.samples["trajectory"].tolist() == [2]
    assert batch.tokens["turn"].tolist() == [-1, 1]
    assert batch.tokens["token_level_rewards"].tolist() == [0, 1]


@pytest.mark.parametrize("count", [0, 2])
def test_a_batch_without_any_token_is_a_batch(count: int) -> None:
    batch = build_batch([trajectory(0, i, [1.0]) for i in range(count)], [[] for _ in range(count)])
    assert (len(batch.trajectories), len(batch.turns), len(batch.samples), len(batch.tokens)) == (count, count, 0, 0)
    assert batch.sampled.tolist() == []
    assert batch.tokens["token_level_rewards"].dtype == np.float64


def test_missing_log_probs_are_nan_on_sampled_tokens_alone() -> None:
    batch = build_batch([trajectory(0, 0, [1.0, 1.0])], [[sample([-1, 0]), sample([-1, 1], logprobs=False)]])
    assert np.array_equal(batch.tokens["infer_log_probs"], np.array([0, -0.5, 0, np.nan], np.float32), equal_nan=True)
    assert not batch.has_infer_log_probs
    assert build_batch([trajectory(0, 0, [1.0])], [[sample([-1, 0])]]).has_infer_log_probs


def test_a_managers_columns_travel_and_are_filled_where_a_sample_lacks_them() -> None:
    given_columns = {
        "experts": np.arange(4, dtype=np.int16).reshape(2, 2),
        "bonus": np.array([0.5, 1.0]),
        "flag": np.array([True, True]),
        "kind": np.array([7, 8], np.uint8),
    }
    batch = build_batch([trajectory(0, 0, [1.0, 1.0])], [[sample([-1, 0], columns=given_columns), sample([-1])]])
    assert batch.tokens["experts"].tolist() == [[0, 1], [2, 3], [-1, -1]]
    assert batch.tokens["experts"].dtype == np.int16
    assert np.array_equal(batch.tokens["bonus"], [0.5, 1.0, np.nan], equal_nan=True)
    assert batch.tokens["flag"].tolist() == [True, True, False]
    assert batch.tokens["kind"].tolist() == [7, 8, 0]


@pytest.mark.parametrize("name", ["turn", "response_mask", "token_level_rewards"])
def test_a_managers_column_cannot_replace_one_of_the_tables(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        build_batch([trajectory(0, 0, [1.0])], [[sample([-1, 0], columns={name: np.zeros(2)})]])


def test_images_stay_with_their_trajectory_and_samples_refer_by_index() -> None:
    picture = np.zeros((2, 2, 3), np.uint8)
    with_image = Trajectory("A", 0, 0, 0, (turn(1.0),), "terminated", images=(picture,))
    rows = [Sample(np.zeros(2), np.array([False, True]), np.array([-1, 0]), None, np.zeros(2), images=(0,))]
    batch = build_batch([with_image], [rows])
    assert batch.images == ((picture,),)
    assert batch.sample_images == ((0,),)


def test_anchors_of_any_type_are_kept_as_they_are() -> None:
    anchors = [1, True, (1, 2), np.zeros((2, 2)), "text", [1, 2]]
    batch = build_batch([Trajectory("A", 0, 0, 0, tuple(turn(0.0, a) for a in anchors), "turns")], [[]])
    assert all(kept is anchor for kept, anchor in zip(batch.turns["anchor"], anchors))


def test_tables_share_columns_and_refuse_other_lengths() -> None:
    table = Table({"a": np.arange(3)}, 3)
    more = table.with_columns(b=np.ones(3))
    assert more["a"] is table["a"]
    assert set(table) == {"a"}
    assert len(more) == 3
    assert bool(Table({}, 0))
    with pytest.raises(ValueError, match="'b' has 2 entries, the table has 3"):
        table.with_columns(b=np.ones(2))
