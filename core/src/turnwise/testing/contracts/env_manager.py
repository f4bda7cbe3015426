"""What every manager keeps: sampled tokens travel untouched, what the environment told arrives in its place, limits
hold, samples are sound, failures pass, episodes do not meet.

A manager may call the model several times to a step of the environment, and give several trajectories of an episode,
one for each role."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from turnwise.contracts.env_manager import ManagerCapabilities, ManagerContext
from turnwise.contracts.environment import Response
from turnwise.data.trajectory import Turn
from turnwise.errors import EnvironmentFailure
from turnwise.testing.compare import same
from turnwise.testing.recorded import LIMITS, TURNS, RecordingSampler, episode, listed, opponents, play
from turnwise.testing.subject import Subject

KIND = "env_manager"


def build(implementation: Subject) -> Any:
    """The manager with its context, or one of a few turns."""
    return implementation.build(implementation.supplied.get("context", ManagerContext(tag="fake", max_turns=TURNS)))


def test_the_trajectories_tell_who_they_are_and_how_they_ended(implementation: Subject, runner: asyncio.Runner) -> None:
    """Identity, role, stop reason, success."""
    manager = build(implementation)
    game = play(implementation, manager, runner)
    for trajectory in game.trajectories:
        assert (trajectory.tag, trajectory.group, trajectory.member, trajectory.attempt, trajectory.seed) == (
            "fake",
            2,
            0,
            1,
            0,
        )
        assert trajectory.stop_reason == "terminated"
        assert isinstance(trajectory.success, bool | np.bool_), (
            "info['success'] of the last step did not reach the trajectory."
        )
    assert len(game.steps) == TURNS
    roles = {trajectory.role for trajectory in game.trajectories}
    declared = implementation.capabilities(ManagerCapabilities).roles or ("",)
    assert roles <= set(declared), (
        f"roles {sorted(roles)}. Fix: ManagerCapabilities(roles=(…)), by which `turnwise plan` counts trajectories."
    )
    longer = play(implementation, manager, runner, length=50)
    assert (len(longer.steps), {t.stop_reason for t in longer.trajectories}) == (TURNS, {"turns"})
    assert len(game.calls) >= TURNS or not game.alone, "fewer turns than steps of the environment."
    cut = play(implementation, manager, runner, truncates=True)
    assert {t.stop_reason for t in cut.trajectories} == {"truncated"}, (
        "the environment ended the episode by its time limit (truncated), and a trajectory tells another reason."
    )
    won = play(implementation, manager, runner, reward=0.0)  # of nothing, half is reached
    for told in (game, won) if game.alone else ():
        assert told.trajectories[0].success == told.world.infos[-1]["success"], (
            "the trajectory's success is not what info['success'] of the last step said."
        )


def test_rewards_belong_to_the_step_that_earned_them(implementation: Subject, runner: asyncio.Runner) -> None:
    """On the turn whose action the environment rewarded."""
    manager = build(implementation)
    for seed in range(4):
        # What the two differ in comes from the environment: a manager's own terms (a penalty of form) are in both.
        once, thrice = (play(implementation, manager, runner, seed, reward=reward) for reward in (1.0, 3.0))
        earned = [b[2] - a[2] for a, b in zip(once.steps, thrice.steps, strict=True)]
        arrived = [0.0] * len(earned)
        for (turn, call, _), (other, *_) in zip(once.calls, thrice.calls, strict=True):
            arrived[call["step"]] += other.reward - turn.reward
        assert any(arrived) or not any(earned), "no reward of the environment arrived."
        if once.alone:
            np.testing.assert_allclose(
                arrived, earned, atol=1e-9, err_msg="a turn's reward is not what the environment gave for its action."
            )


def test_a_turn_tells_the_state_before_its_call(implementation: Subject, runner: asyncio.Runner) -> None:
    """Its observation and anchor, by which turns are grouped."""
    game = play(implementation, build(implementation), runner)
    seen: set[int] = set()
    for turn, call, _ in game.calls:
        step = call["step"]
        if step in seen:
            continue  # a further call about the same state may say so in its anchor, and is shown something else
        seen.add(step)
        before = game.world.infos[step]["state_key"]
        assert same(turn.anchor, before), (
            f"the turn's anchor is {turn.anchor!r}; the state before its call was {before!r}. Fix: take"
            " info['state_key'] before environment.step answers."
        )
        shown = game.world.observations[step]
        assert same(turn.observation, shown), (
            f"the turn's observation is {turn.observation!r:.80}; the environment had shown {shown!r:.80}."
        )


def test_sampled_tokens_and_their_log_probs_travel_untouched(implementation: Subject, runner: asyncio.Runner) -> None:
    """Never decoded and encoded again."""
    for turn, call, answer in play(implementation, build(implementation), runner).calls:
        assert answer.ids is not None
        assert answer.logprobs is not None
        mask = turn.response_mask
        assert turn.response_ids.shape == mask.shape == turn.versions.shape
        assert turn.logprobs is not None
        np.testing.assert_array_equal(
            turn.response_ids[mask], answer.ids, "sampled ids were changed (decoded and encoded again?)."
        )
        np.testing.assert_array_equal(turn.logprobs[mask], answer.logprobs, "log-probs were changed.")
        np.testing.assert_array_equal(turn.versions[mask], answer.versions, "policy versions were changed.")
        np.testing.assert_array_equal(turn.prompt_ids, call["ids"], "prompt_ids are not what the model was given.")
        assert np.isfinite(turn.reward)


def test_calls_respect_every_limit(implementation: Subject, runner: asyncio.Runner) -> None:
    """Tokens of a turn and of a prompt with its answer; each call has its number, ids and legal actions."""
    sampler = play(implementation, build(implementation), runner).sampler
    numbers = [call["turn"] for call in sampler.calls]
    assert numbers == sorted(set(numbers)), (
        f"calls are numbered {numbers}; a request's seed follows from its number, so each needs a new one."
    )
    for call in sampler.calls:
        assert 0 < call["max_new_tokens"] <= min(LIMITS.max_new_tokens, LIMITS.max_tokens_per_step)
        assert len(call["ids"]) + call["max_new_tokens"] <= LIMITS.sequence_length
        assert call["ids"].dtype == np.int32
        assert call["actions"] == ("a", "b"), "the legal actions of info['actions'] did not reach the sampler."


def test_the_whole_response_reaches_the_environment(implementation: Subject, runner: asyncio.Runner) -> None:
    """For those that reward form and length."""
    game = play(implementation, build(implementation), runner)
    # Players beside the model speak to the environment, too, and their responses are not among the model's.
    known = [Response.of(answer) for _, _, answer in game.calls]
    spoken = implementation.supplied.get("samplers")
    for action, response, _ in game.steps:
        assert response is not None, (
            "step got no response. Fix: environment.step(action, Response.of(generation)), for rewards of form and"
            " length."
        )
        assert response in known or spoken, (
            f"step got the response {response}, which the model did not give for {action!r}."
        )


def test_samples_hold_every_sampled_token_once(implementation: Subject, runner: asyncio.Runner) -> None:
    """With mask, log-prob and version at its place."""
    manager = build(implementation)
    for trajectory in play(implementation, manager, runner).trajectories:
        seen: dict[int, list[tuple[int, float, int]]] = {}
        for row in manager.samples(trajectory):
            length = len(row.input_ids)
            assert length <= LIMITS.sequence_length
            assert row.input_ids.dtype == np.int32
            assert row.response_mask.dtype == np.bool_
            assert row.response_mask.shape == row.turn.shape == row.versions.shape == (length,)
            assert row.logprobs is not None
            assert row.logprobs.shape == (length,)
            mask = row.response_mask
            assert not mask[0], "the first token of a row is marked as sampled; a token needs one before it."
            assert (row.turn[~mask] == -1).all(), "turn must be −1 where nothing was sampled."
            assert not row.logprobs[~mask].any(), "log-probs must be 0 where nothing was sampled."
            assert (row.versions[mask] >= 0).all(), "a sampled token has no policy version."
            known = zip(row.turn[mask], row.input_ids[mask], row.logprobs[mask], row.versions[mask])
            for turn, token, logprob, version in known:
                seen.setdefault(int(turn), []).append((int(token), float(logprob), int(version)))
        expected = {k: _sampled(turn) for k, turn in enumerate(trajectory.turns) if turn.response_mask.any()}
        # The ids first and alone: which of a token's facts is wrong decides what the author is told.
        tokens, wanted = ({k: [t[0] for t in found[k]] for k in found} for found in (seen, expected))
        assert tokens == wanted, "the rows hold other sampled tokens than the turns."
        assert seen == expected, "a sampled token has another log-prob, or policy version, in its row than in its turn."


def _sampled(turn: Turn) -> list[tuple[int, float, int]]:
    """(id, log-prob, version) of the turn's sampled tokens."""
    assert turn.logprobs is not None
    columns = (turn.response_ids, turn.logprobs, turn.versions)
    known = zip(*(column[turn.response_mask] for column in columns))
    return [(int(token), float(logprob), int(version)) for token, logprob, version in known]


def test_rows_and_calls_are_as_many_as_the_manager_declares(implementation: Subject, runner: asyncio.Runner) -> None:
    """By which `turnwise plan` counts."""
    manager = build(implementation)
    declares = implementation.capabilities(ManagerCapabilities)
    game = play(implementation, manager, runner)
    calls, allowed = len(game.sampler.calls), TURNS * declares.calls_per_step
    assert calls <= allowed, (
        f"{calls} calls of the model to {TURNS} steps of the environment, {allowed} declared. Fix:"
        " ManagerCapabilities(calls_per_step=…), by which `turnwise plan` counts tokens and rows."
    )
    most = allowed if declares.row_per_turn else 1
    for trajectory in game.trajectories:
        rows = len(manager.samples(trajectory))
        assert rows <= most, (
            f"{rows} rows of a trajectory of {TURNS} steps, {most} declared. Fix:"
            " ManagerCapabilities(row_per_turn=True), by which `turnwise plan` counts rows."
        )


def test_columns_of_its_own_are_declared(implementation: Subject, runner: asyncio.Runner) -> None:
    """An estimator that needs one is refused where nobody makes it."""
    manager = build(implementation)
    declares = implementation.capabilities(ManagerCapabilities)
    written = {
        name
        for trajectory in play(implementation, manager, runner).trajectories
        for sample in manager.samples(trajectory)
        for name in sample.columns
    }
    assert written <= declares.columns, (
        f"samples have the columns {sorted(written)}, {sorted(declares.columns)} declared. Fix:"
        " ManagerCapabilities(columns=…), without which an estimator that needs one is refused."
    )


def test_a_first_prompt_over_the_limit_is_never_sent(implementation: Subject, runner: asyncio.Runner) -> None:
    """The episode ends before its first turn."""
    manager = build(implementation)
    # Below the shortest prompt that the fake chat can write.
    game = play(implementation, manager, runner, limits=evolve(LIMITS, sequence_length=7))
    assert game.sampler.calls == [], "a prompt without room was sent to the model."
    assert "length" in {trajectory.stop_reason for trajectory in game.trajectories}
    for trajectory in game.trajectories:
        assert trajectory.turns == ()
        assert manager.samples(trajectory) == []


def test_a_failing_environment_is_not_swallowed(implementation: Subject, runner: asyncio.Runner) -> None:
    """It is retried, and counted, by the scheduler."""
    manager = build(implementation)
    for failure in ("raise", "nan", "nontext"):
        with pytest.raises(EnvironmentFailure):
            play(implementation, manager, runner, fails=failure)


def test_episodes_do_not_meet(implementation: Subject, runner: asyncio.Runner) -> None:
    """One manager plays many at the same time."""
    manager = build(implementation)
    alone = [play(implementation, manager, runner, seed).trajectories for seed in range(3)]

    async def together() -> list[Any]:
        return await asyncio.gather(
            *[
                manager.run(episode(seed, samplers=opponents(implementation, seed)), RecordingSampler(seed))
                for seed in range(3)
            ]
        )

    for first, second in zip(alone, map(listed, runner.run(together()))):
        for one, other in zip(first, second, strict=True):
            assert [t.text for t in one.turns] == [t.text for t in other.turns], (
                "an episode changes when others play at the same time."
            )
            for row, other_row in zip(manager.samples(one), manager.samples(other), strict=True):
                np.testing.assert_array_equal(row.input_ids, other_row.input_ids)


def test_images_are_kept_once_and_named_by_index(implementation: Subject, runner: asyncio.Runner) -> None:
    """Uint8 [H, W, 3] in the trajectory; turns and rows refer to them."""
    manager = build(implementation)
    game = play(implementation, manager, runner, images=True)
    assert any(call["images"] for call in game.sampler.calls), (
        "the first observation's image did not reach the sampler."
    )
    for turn, call, _ in game.calls:
        assert len(turn.images) == len(call["images"])
    for trajectory in game.trajectories:
        count = len(trajectory.images)
        assert all(image.dtype == np.uint8 and image.ndim == 3 for image in trajectory.images)
        assert all(0 <= index < count for turn in trajectory.turns for index in turn.images)
        assert all(0 <= index < count for row in manager.samples(trajectory) for index in row.images)


def test_a_backend_of_messages_gets_messages(implementation: Subject, runner: asyncio.Runner) -> None:
    """Where there is no chat, nothing is rendered."""
    manager = build(implementation)
    game = play(implementation, manager, runner, input="messages")
    texts = [turn.text for trajectory in game.trajectories for turn in trajectory.turns]
    assert sorted(texts) == sorted(answer.text for answer in game.sampler.answers)
    for call in game.sampler.calls:
        assert call["ids"] is None
        assert call["messages"], "a backend that takes messages was given none."
        assert all({"role", "content"} <= message.keys() for message in call["messages"])
