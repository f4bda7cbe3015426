"""Properties over random episodes: masks, alignment, the prefix chain, and the length limits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from managers_fakes import ScriptedEnv, ScriptedSampler, going, image_part, run, text_part

from turnwise.contracts.env_manager import Limits, ManagerContext
from turnwise.data.batch import build_batch
from turnwise.data.trajectory import Sample, Trajectory
from turnwise.testing.fake_model import END, IMAGE, IMAGE_TOKENS, ROLES
from turnwise_managers.config import StepwiseConfig, TrajectoryConfig
from turnwise_managers.stepwise import StepwiseManager
from turnwise_managers.trajectory import TrajectoryManager

texts = st.text("abc", max_size=8)
parts = st.lists(st.one_of(texts.map(text_part), st.integers(0, 3).map(image_part)), max_size=4)
plays = st.lists(st.tuples(st.one_of(texts, parts), texts), min_size=1, max_size=6)
limits_of = st.builds(Limits, st.integers(10, 90), st.integers(1, 12), st.integers(1, 12), st.integers(1, 5))


def played(
    manager: Any, script: list[tuple[Any, str]], limits: Limits
) -> tuple[Trajectory, list[Sample], ScriptedSampler]:
    sampler = ScriptedSampler([text for _, text in script])
    env = ScriptedEnv(
        script[0][0],
        [*going(*[observation for observation, _ in script[1:]], reward=1.0), ("end", 1.0, True, False, {})],
    )
    trajectory = run(manager, env, sampler, limits)
    return trajectory, manager.samples(trajectory), sampler


def check_rows(trajectory: Trajectory, rows: list[Sample], sampler: ScriptedSampler, limits: Limits) -> None:
    assert len(sampler.calls) == len(trajectory.turns) <= limits.max_turns
    seen: dict[int, list[int]] = {}
    for row in rows:
        assert not row.response_mask[0]
        np.testing.assert_array_equal(row.turn >= 0, row.response_mask)
        assert (row.versions[~row.response_mask] == -1).all()
        assert row.logprobs is not None
        assert (row.logprobs[~row.response_mask] == 0).all()
        for turn in sorted(set(row.turn[row.response_mask].tolist())):
            mine = row.turn == turn
            count = np.arange(mine.sum())
            seen[turn] = row.input_ids[mine].tolist()
            np.testing.assert_array_equal(row.versions[mine], 10 * turn + count)
            np.testing.assert_array_equal(row.logprobs[mine], (-turn - count / 100).astype(np.float32))
    answered = {
        index: turn.response_ids.tolist() for index, turn in enumerate(trajectory.turns) if len(turn.response_ids)
    }
    assert seen == answered
    batch = build_batch([trajectory], [rows])
    if rows:
        assert batch.tokens["token_level_rewards"].sum() == trajectory.score


def check_images(trajectory: Trajectory, sampler: ScriptedSampler) -> None:
    for turn, call in zip(trajectory.turns, sampler.calls, strict=True):
        assert (turn.prompt_ids == IMAGE).sum() == IMAGE_TOKENS * len(turn.images)
        assert [id(picture) for picture in call["images"]] == [id(trajectory.images[index]) for index in turn.images]
    contents = [picture.tobytes() for picture in trajectory.images]
    assert len(set(contents)) == len(contents)


@settings(max_examples=150)
@given(plays, limits_of)
def test_trajectory_rows_are_prefix_chains_of_what_was_sent_and_sampled(
    script: list[tuple[Any, str]], limits: Limits
) -> None:
    manager = TrajectoryManager(TrajectoryConfig(), ManagerContext())
    trajectory, rows, sampler = played(manager, script, limits)
    check_rows(trajectory, rows, sampler, limits)
    check_images(trajectory, sampler)
    assert len(rows) == any(len(turn.response_ids) for turn in trajectory.turns)
    chain = [[*turn.prompt_ids.tolist(), *turn.response_ids.tolist()] for turn in trajectory.turns]
    for shorter, longer in pairwise(chain):
        assert longer[: len(shorter)] == shorter
        assert longer[len(shorter)] in (END, ROLES["user"])
    assert all(len(ids) <= limits.sequence_length for ids in chain)
    if rows:
        assert rows[0].input_ids.tolist() == chain[-1]


@settings(max_examples=150)
@given(plays, limits_of, st.one_of(st.none(), st.integers(0, 3)))
def test_stepwise_rows_never_exceed_prompt_limit_plus_new_tokens(
    script: list[tuple[Any, str]], limits: Limits, length: int | None
) -> None:
    manager = StepwiseManager(StepwiseConfig(history_length=length), ManagerContext())
    trajectory, rows, sampler = played(manager, script, limits)
    check_rows(trajectory, rows, sampler, limits)
    check_images(trajectory, sampler)
    assert all(len(turn.prompt_ids) <= limits.max_prompt_length for turn in trajectory.turns)
    assert all(len(row.input_ids) <= limits.max_prompt_length + limits.max_new_tokens for row in rows)
    assert all(row.response_length == row.response_mask.sum() for row in rows)
    assert len(rows) == sum(len(turn.response_ids) > 0 for turn in trajectory.turns)
