"""Merging the samples of neighbouring turns, expert indices, and what merging may never change: rewards, alignment and
the objective."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from managers_fakes import ROOMY, ScriptedEnv, ScriptedSampler, going, image_part, prompt, run, text_ids

from turnwise.contracts.env_manager import ManagerContext
from turnwise.data.batch import Batch, build_batch
from turnwise.data.trajectory import Sample, Trajectory, Turn
from turnwise.pipeline.aggregation import MODES, token_coefficients
from turnwise.testing.fake_model import END
from turnwise_managers.config import StepwiseConfig
from turnwise_managers.samples import merged
from turnwise_managers.stepwise import StepwiseManager


def turn(
    prompt_ids: Sequence[int], response: Sequence[int], reward: float = 0.0, appended: int = 0, **more: Any
) -> Turn:
    """A turn whose last `appended` response tokens were not sampled; log-probs and versions tell token from token."""
    n = len(response)
    mask = np.arange(n) < n - appended
    given_logprobs = more.pop("logprobs", True)
    return Turn(
        prompt_ids=np.array(prompt_ids, np.int32),
        response_ids=np.array(response, np.int32),
        response_mask=mask,
        logprobs=np.where(mask, -np.array(response, np.float32) / 8, 0).astype(np.float32) if given_logprobs else None,
        versions=np.where(mask, np.array(response) * 3, -1).astype(np.int32),
        reward=reward,
        anchor="",
        **more,
    )


def trajectory(*turns: Turn, group: int = 0, member: int = 0) -> Trajectory:
    return Trajectory("Tag", group, member, 0, turns, "turns")


def ids(rows: Sequence[Sample]) -> list[list[int]]:
    return [row.input_ids.tolist() for row in rows]


def sampled(row: Sample) -> list[tuple[int, int]]:
    """(turn, id) of every sampled token."""
    return [(int(row.turn[i]), int(row.input_ids[i])) for i in np.flatnonzero(row.response_mask)]


def test_a_response_followed_by_an_observation_is_one_row_with_the_observation_unsampled() -> None:
    (row,) = merged([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5, 6], [7])])
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row.response_mask.tolist() == [False, False, True, True, False, False, True]
    assert row.turn.tolist() == [-1, -1, 0, 0, -1, -1, 1]
    assert row.versions.tolist() == [-1, -1, 9, 12, -1, -1, 21]
    np.testing.assert_array_equal(row.logprobs, np.array([0, 0, -3 / 8, -4 / 8, 0, 0, -7 / 8], np.float32))


def test_an_observation_that_is_already_inside_the_response_is_not_inserted_again() -> None:
    """An engine's own tool call: [4, 5] came between sampled tokens and stands in the response with mask 0; the next
    prompt adds nothing."""
    inside = evolve(turn([1], [3, 4, 5]), response_mask=np.array([True, False, False]))
    (row,) = merged([inside, turn([1, 3, 4, 5], [6])])
    assert row.input_ids.tolist() == [1, 3, 4, 5, 6]
    assert row.response_mask.tolist() == [False, True, False, False, True]


def test_both_kinds_of_observation_in_one_trajectory() -> None:
    (row,) = merged([turn([1], [2, 3], appended=1), turn([1, 2, 3], [4]), turn([1, 2, 3, 4, 5], [6, 7], appended=1)])
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sampled(row) == [(0, 2), (1, 4), (2, 6)]


def test_three_turns_in_a_chain_are_one_row() -> None:
    (row,) = merged([turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 3, 4, 5], [6])])
    assert sampled(row) == [(0, 2), (1, 4), (2, 6)]


def test_a_single_turn_is_what_it_is_without_merging() -> None:
    manager = StepwiseManager(StepwiseConfig(merge_steps=True), ManagerContext())
    plain = StepwiseManager(StepwiseConfig(), ManagerContext())
    played = trajectory(turn([1, 2], [3, 4], appended=1))
    (one,), (other,) = manager.samples(played), plain.samples(played)
    for name in ("input_ids", "response_mask", "turn", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(
    "second",
    [
        turn([1, 9, 3, 4], [5]),  # another prompt
        turn([1, 2, 9, 4], [5]),  # the response re-tokenised
        turn([1, 2], [3, 5]),  # prefix of prompt and response together, but not of the prompt alone
        turn([1], [2, 3, 4]),
        turn([1, 2, 3], []),  # and nothing sampled: no row of its own
    ],
)
def test_a_mismatch_starts_a_new_row(second: Turn) -> None:
    assert ids(merged([turn([1, 2], [3]), second])) == [
        [1, 2, 3],
        *([[*second.prompt_ids.tolist(), *second.response_ids.tolist()]] if len(second.response_ids) else []),
    ]


def test_a_trajectory_may_merge_in_part() -> None:
    rows = merged([turn([1], [2]), turn([1, 2, 3], [4]), turn([9], [5]), turn([9, 5, 6], [7])])
    assert ids(rows) == [[1, 2, 3, 4], [9, 5, 6, 7]]
    assert [sampled(row) for row in rows] == [[(0, 2), (1, 4)], [(2, 5), (3, 7)]]


def test_several_trajectories_mixed_keep_their_rows_apart() -> None:
    manager = StepwiseManager(StepwiseConfig(merge_steps=True), ManagerContext())
    played = [
        trajectory(turn([1], [2], 1.0), turn([1, 2, 3], [4], 2.0), member=0),
        trajectory(turn([1], [2], 4.0), turn([9], [4], 8.0), member=1),
        trajectory(member=2),
        trajectory(turn([1, 2, 3], [4], 16.0), member=3),  # begins as another one's row does
    ]
    batch = build_batch(played, [manager.samples(t) for t in played])
    assert batch.samples["trajectory"].tolist() == [0, 1, 1, 3]
    assert batch.samples["length"].tolist() == [4, 2, 2, 4]
    assert batch.trajectories["scores"].tolist() == [3.0, 12.0, 0.0, 16.0]
    assert batch.tokens["token_level_rewards"].tolist() == [0, 1, 0, 2, 0, 4, 0, 8, 0, 0, 0, 16]


def test_intermediate_rewards_stay_on_the_last_sampled_token_of_their_turn() -> None:
    played = trajectory(
        turn([1], [2, 3, 4], 0.5, appended=1), turn([1, 2, 3, 4, 5], [6], 0.25), turn([1, 2, 3, 4, 5, 6, 7], [], 0.125)
    )
    rewards = build_batch([played], [merged(played.turns)]).tokens["token_level_rewards"]
    assert rewards.tolist() == [0, 0, 0.5, 0, 0, 0.375]


def test_missing_log_probs_of_one_turn_leave_its_row_without_and_no_other() -> None:
    rows = merged([turn([1], [2]), turn([1, 2, 3], [4], logprobs=False), turn([9], [5])])
    assert [row.logprobs is None for row in rows] == [True, False]


def test_a_turn_without_sampled_tokens_stands_in_no_ones_way() -> None:
    rows = merged([turn([1], [2]), turn([8, 8], []), turn([1, 2, 3], [4])])
    assert ids(rows) == [[1, 2, 3, 4]]
    assert merged([turn([1], []), turn([1], [7], appended=1)]) == []


def test_turns_without_prompt_tokens_give_no_rows() -> None:
    assert merged([turn([], [1]), turn([], [2])]) == []


def test_images_are_part_of_the_prefix() -> None:
    first, second = turn([1], [2], images=(0, 1)), turn([1, 2, 3], [4], images=(0, 1, 2))
    (row,) = merged([first, second])
    assert row.images == (0, 1, 2)
    for other in ((1, 0, 2), (0,), ()):
        assert len(merged([first, evolve(second, images=other)])) == 2


@pytest.mark.parametrize(("history_length", "rows"), [(None, 1), (0, 3), (1, 2)])
def test_what_history_shows_decides_what_merges(history_length: int | None, rows: int) -> None:
    """With one earlier turn, the second prompt continues the first, the third begins at the second turn."""
    manager = StepwiseManager(StepwiseConfig(history_length=history_length, merge_steps=True), ManagerContext())
    env = ScriptedEnv("s0", going("s1", "s2", "s3", reward=1.0))
    played = run(manager, env, ScriptedSampler(["a", "b", "c"]), evolve(ROOMY, max_turns=3))
    cut = manager.samples(played)
    assert len(cut) == rows
    if rows == 1:
        last = prompt(("user", "s0"), ("assistant", "a"), ("user", "s1"), ("assistant", "b"), ("user", "s2"))
        assert cut[0].input_ids.tolist() == [*last, *text_ids("c"), END]
    assert build_batch([played], [cut]).tokens["token_level_rewards"].sum() == 3.0


def test_images_of_the_environment_merge() -> None:
    manager = StepwiseManager(StepwiseConfig(merge_steps=True), ManagerContext())
    env = ScriptedEnv([image_part(1)], going([image_part(2)], "s2"))
    played = run(manager, env, ScriptedSampler(["a", "b"]), evolve(ROOMY, max_turns=2))
    (row,) = manager.samples(played)
    assert row.images == (0, 1)


# --- expert indices


def experts(tokens: int, layers: int = 2, top_k: int = 3, start: int = 0) -> np.ndarray:
    return np.arange(start, start + tokens * layers * top_k).reshape(tokens, layers, top_k)


@pytest.mark.parametrize("kind", [list, np.asarray])
def test_expert_indices_align_with_sampled_tokens_and_appended_tokens_get_minus_one(kind: Any) -> None:
    given_ = experts(2)
    (row,) = merged([turn([1, 2], [3, 4, 5], appended=1, extras={"expert_indices": kind(given_.tolist())})])
    column = row.columns["expert_indices"]
    assert (column.shape, column.dtype) == ((5, 2, 3), np.int32)
    np.testing.assert_array_equal(column[2:4], given_)
    assert (column[[0, 1, 4]] == -1).all()


def test_expert_indices_merge_and_a_turn_without_has_minus_one() -> None:
    first, third = experts(1), experts(2, start=50)
    turns = [
        turn([1], [2], extras={"expert_indices": first}),
        turn([1, 2, 3], [4], extras={"expert_indices": []}),
        turn([1, 2, 3, 4], [5, 6], extras={"expert_indices": third}),
    ]
    (row,) = merged(turns)
    column = row.columns["expert_indices"]
    np.testing.assert_array_equal(column[1], first[0])
    np.testing.assert_array_equal(column[4:], third)
    assert (column[[0, 2, 3]] == -1).all()
    batch = build_batch([trajectory(*turns)], [[row]])
    np.testing.assert_array_equal(batch.tokens["expert_indices"], column)


def test_no_expert_indices_are_no_column_also_with_an_appended_token() -> None:
    for nothing in ([], np.zeros((0, 2, 3)), None):
        (row,) = merged([turn([1], [2, 3], appended=1, extras={"expert_indices": nothing})])
        assert row.columns == {}


@pytest.mark.parametrize("count", [1, 3, 4])
def test_another_number_of_expert_indices_is_an_error(count: int) -> None:
    with pytest.raises(ValueError, match=f"expert_indices has {count} entries for 2 sampled tokens"):
        merged([turn([1], [2, 3, 4], appended=1, extras={"expert_indices": experts(count)})])


def test_expert_indices_of_another_shape_are_an_error() -> None:
    with pytest.raises(ValueError, match="different shapes"):
        merged(
            [
                turn([1], [2], extras={"expert_indices": experts(1)}),
                turn([1, 2], [3], extras={"expert_indices": experts(1, 4)}),
            ]
        )
    with pytest.raises(ValueError, match=r"float64 \[1, 2\], not integers"):
        merged([turn([1], [2], extras={"expert_indices": np.zeros((1, 2))})])


def test_expert_indices_of_a_backend_reach_the_samples_through_play() -> None:
    sampler = ScriptedSampler(
        ["ab", "c"],
        change=lambda g: evolve(g, extras={"expert_indices": experts(0 if g.ids is None else len(g.ids)).tolist()}),
    )
    manager = StepwiseManager(StepwiseConfig(merge_steps=True), ManagerContext())
    played = run(manager, ScriptedEnv("s0", going("s1", "s2")), sampler, evolve(ROOMY, max_turns=2))
    (row,) = manager.samples(played)
    column = row.columns["expert_indices"]
    np.testing.assert_array_equal((column >= 0).all((1, 2)), row.response_mask)


# --- the objective


def drifting(seed: int, members: int = 6) -> list[Trajectory]:
    """Trajectories of up to five turns; some prompts continue the one before, others begin anew; some responses end in
    an appended token."""
    rng = np.random.default_rng(seed)
    out = []
    for member in range(members):
        turns: list[Turn] = []
        for _ in range(int(rng.integers(0, 6))):
            so_far: list[int] = [] if not turns else [*turns[-1].prompt_ids.tolist(), *turns[-1].response_ids.tolist()]
            new = rng.integers(1, 50, int(rng.integers(1, 4))).tolist()
            prompt_ids = [*so_far, *new] if turns and rng.random() < 0.6 else new
            response = rng.integers(1, 50, int(rng.integers(0, 5))).tolist()
            appended = int(rng.random() < 0.3 and len(response) > 0)
            turns.append(turn(prompt_ids, response, float(rng.normal()), appended))
        out.append(trajectory(*turns, member=member))
    return out


def cuts(played: Sequence[Trajectory]) -> tuple[Batch, Batch]:
    """The batch of one row a turn, and the merged one."""
    step, both = (StepwiseManager(StepwiseConfig(merge_steps=merge), ManagerContext()) for merge in (False, True))
    return build_batch(played, [step.samples(t) for t in played]), build_batch(
        played, [both.samples(t) for t in played]
    )


def gradient(batch: Batch, mode: str, unit: str) -> np.ndarray:
    """float64 [R]: what each sampled token's log-prob is multiplied with in the objective, in (trajectory, turn,
    position) order.

    The advantage of a token is made of its trajectory, its turn and its id, which merging may not touch."""
    lengths = np.bincount(batch.tokens["sample"][batch.sampled], minlength=len(batch.samples))
    owner = batch.samples["trajectory"]
    coef = token_coefficients(mode, unit, np.arange(len(owner)), owner, np.ones(len(owner)), lengths, scale=7.0)
    at = batch.sampled
    advantage = np.sin(
        1 + batch.tokens["trajectory"][at] + 10 * batch.tokens["turn"][at] + 0.1 * batch.tokens["input_ids"][at]
    )
    return coef[batch.tokens["sample"][at]] * advantage


@pytest.mark.parametrize(("mode", "unit"), [*((mode, "trajectory") for mode in MODES), ("token-mean", "sample")])
def test_the_gradient_is_equal_before_and_after_merging(mode: str, unit: str) -> None:
    for seed in range(20):
        before, after = cuts(drifting(seed))
        np.testing.assert_array_equal(
            before.tokens["input_ids"][before.sampled], after.tokens["input_ids"][after.sampled]
        )
        one, other = gradient(before, mode, unit), gradient(after, mode, unit)
        assert np.linalg.norm(one - other) <= 1e-12 * np.linalg.norm(one)
        if seed == 0:
            assert len(after.samples) < len(before.samples)
            assert np.linalg.norm(one) > 0


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token-mean"])
def test_a_row_as_the_unit_is_another_objective_once_rows_merge(mode: str) -> None:
    """Why the default unit is the trajectory: with `sample`, the cut of the rows changes what is minimised."""
    before, after = cuts(drifting(0))
    assert not np.allclose(gradient(before, mode, "sample"), gradient(after, mode, "sample"))


def slow_reference(played: Trajectory) -> list[list[tuple[int, bool, int, float, int]]]:
    """Rows as (id, sampled, turn, log-prob, version), token by token on plain lists."""
    rows: list[list[tuple[int, bool, int, float, int]]] = []
    for index, t in enumerate(played.turns):
        response = list(
            zip(t.response_ids.tolist(), t.response_mask.tolist(), t.logprobs.tolist(), t.versions.tolist())
        )  # type: ignore[union-attr]
        if not any(token[1] for token in response):
            continue
        prompt_ids = t.prompt_ids.tolist()
        so_far = [token[0] for token in rows[-1]] if rows else None
        if so_far is None or prompt_ids[: len(so_far)] != so_far:
            rows.append([])
        added = prompt_ids[len(rows[-1]) :]
        rows[-1] += [(i, False, -1, 0.0, -1) for i in added]
        rows[-1] += [(i, True, index, lp, v) if m else (i, False, -1, 0.0, -1) for i, m, lp, v in response]
    return rows


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_random_drift_merges_as_the_slow_reference_does(seed: int, narrow: bool) -> None:
    for played in drifting(seed, members=2):
        if narrow:  # two token ids only: prefixes come about by chance
            played = evolve(
                played,
                turns=tuple(
                    evolve(t, prompt_ids=t.prompt_ids % 2, response_ids=t.response_ids % 2) for t in played.turns
                ),
            )
        rows = merged(played.turns)
        got = [
            [
                (
                    int(row.input_ids[i]),
                    bool(row.response_mask[i]),
                    int(row.turn[i]),
                    float(row.logprobs[i]),
                    int(row.versions[i]),
                )  # type: ignore[index]
                for i in range(len(row.input_ids))
            ]
            for row in rows
        ]
        assert got == slow_reference(played)
        whole = [token for row in rows for token in sampled(row)]
        turns = [number for number, _ in whole]
        assert all(one <= other for one, other in pairwise(turns))
        if rows:
            assert build_batch([played], [rows]).tokens["token_level_rewards"].sum() == pytest.approx(played.score)
