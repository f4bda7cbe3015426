"""What every manager keeps: sampled tokens travel untouched, limits hold, samples are sound, failures pass, episodes do
not meet.

A manager may call the model several times to a step of the environment, and give several trajectories of an episode,
one for each role."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from attrs import define, evolve, field

from turnwise.contracts.chat import Message
from turnwise.contracts.env_manager import Episode, Limits, ManagerCapabilities, ManagerContext
from turnwise.contracts.environment import Response, check_reset, check_step
from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.data.trajectory import Generation, Trajectory, Turn
from turnwise.errors import EnvironmentFailure
from turnwise.testing.fakes import FakeBackend, FakeBackendConfig, FakeChat, FakeEnvironment
from turnwise.testing.subject import Subject

KIND = "env_manager"
TURNS = 3
LIMITS = Limits(sequence_length=8192, max_new_tokens=6, max_tokens_per_step=5, max_turns=TURNS)


@define
class PlainEnvironment:
    """The fake environment as a manager sees it."""

    environment: FakeEnvironment
    seed: int
    steps: list[tuple[str, Response | None, float]] = field(factory=list)

    async def reset(self) -> tuple[Any, dict[str, Any]]:
        """Reset, checked."""
        return check_reset(self.environment.reset(seed=self.seed), "fake")

    async def step(
        self, action: str, response: Response | None = None
    ) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, checked; what the environment raises is an EnvironmentFailure."""
        try:
            answer = check_step(self.environment.step(action), "fake")
            self.steps.append((action, response, answer[1]))
            return answer
        except RuntimeError as error:
            raise EnvironmentFailure(str(error)) from error


@define
class RecordingSampler:
    """Samples with the fake backend and writes down every call; with `input: messages` it answers with text alone."""

    seed: int
    input: str = "ids"
    calls: list[dict[str, Any]] = field(factory=list)
    answers: list[Generation] = field(factory=list)
    _backend: FakeBackend = field(factory=lambda: FakeBackend(FakeBackendConfig(), InferenceContext(None, FakeChat())))

    async def generate(
        self,
        *,
        turn: int,
        ids: np.ndarray | None = None,
        messages: list[Message] | None = None,
        images: tuple[np.ndarray, ...] = (),
        max_new_tokens: int,
        actions: tuple[str, ...] = (),
    ) -> Generation:
        """Sample one response."""
        self.calls.append(
            {
                "turn": turn,
                "ids": ids,
                "messages": messages,
                "images": images,
                "max_new_tokens": max_new_tokens,
                "actions": actions,
            }
        )
        prompt = np.zeros(1, np.int32) if ids is None else ids
        answer = await self._backend.generate(
            Request(1000 * self.seed + turn, GeneratingArgs(), max_new_tokens, ids=prompt)
        )
        if self.input == "messages":
            answer = Generation(answer.text, None, None, None, answer.finish)
        self.answers.append(answer)
        return answer


def build(implementation: Subject) -> Any:
    return implementation.build(implementation.supplied.get("context", ManagerContext(tag="fake", max_turns=TURNS)))


def opponents(implementation: Subject, seed: int) -> dict[str, RecordingSampler]:
    """The further models that the author's fixture names under `samplers`."""
    return {
        name: RecordingSampler(seed + 500 + k, "messages")
        for k, name in enumerate(implementation.supplied.get("samplers", ()))
    }


def episode(
    seed: int = 0, limits: Limits = LIMITS, chat: FakeChat | None = None, samplers: Any = None, **options: Any
) -> Episode:
    environment: Any = PlainEnvironment(FakeEnvironment(**options), seed)
    return Episode(environment, chat or FakeChat(), limits, "fake", 2, seed, 1, seed, samplers or {})


@define
class Game:
    """One episode as it was played: its trajectories, the run's own sampler, and the steps that the environment
    took."""

    trajectories: list[Trajectory]
    sampler: RecordingSampler
    steps: list[tuple[str, Response | None, float]]

    @property
    def calls(self) -> list[tuple[Turn, dict[str, Any], Generation]]:
        """(turn, what was asked, the answer) for every turn of every trajectory, matched by the tokens."""
        left = list(zip(self.sampler.calls, self.sampler.answers, strict=True))
        found = []
        for turn in [turn for trajectory in self.trajectories for turn in trajectory.turns]:
            same = [k for k, (call, answer) in enumerate(left) if _is_call(turn, call, answer)]
            assert same, (
                f"the turn {turn.text!r} is no call of the model: its prompt or its sampled ids were changed (decoded"
                " and encoded again?)."
            )
            found.append((turn, *left.pop(same[0])))
        assert not left, f"{len(left)} calls of the model are in no trajectory."
        return found


def _is_call(turn: Turn, call: dict[str, Any], answer: Generation) -> bool:
    if call["ids"] is None or answer.ids is None:
        return turn.text == answer.text
    return np.array_equal(turn.prompt_ids, call["ids"]) and np.array_equal(
        turn.response_ids[turn.response_mask], answer.ids
    )


def play(
    implementation: Subject, manager: Any, runner: asyncio.Runner, seed: int = 0, input: str = "ids", **options: Any
) -> Game:
    sampler = RecordingSampler(seed, input)
    played = episode(seed, samplers=opponents(implementation, seed), **options)
    if input == "messages":
        played = evolve(played, chat=None)
    environment: Any = played.environment
    return Game(_listed(runner.run(manager.run(played, sampler))), sampler, environment.steps)


def _listed(played: Trajectory | list[Trajectory]) -> list[Trajectory]:
    trajectories = [played] if isinstance(played, Trajectory) else played
    roles = [trajectory.role for trajectory in trajectories]
    assert len(set(roles)) == len(roles) > 0, (
        f"run returned trajectories of the roles {roles}; each needs one of its own."
    )
    return trajectories


def test_the_trajectories_tell_who_they_are_and_how_they_ended(implementation: Subject, runner: asyncio.Runner) -> None:
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
    alone = len(game.trajectories) == 1 and not implementation.supplied.get("samplers")
    assert len(game.calls) >= TURNS or not alone, "fewer turns than steps of the environment."


def test_sampled_tokens_and_their_log_probs_travel_untouched(implementation: Subject, runner: asyncio.Runner) -> None:
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
        np.testing.assert_array_equal(turn.prompt_ids, call["ids"], "prompt_ids are not what the model was given.")
        assert np.isfinite(turn.reward)


def test_calls_respect_every_limit(implementation: Subject, runner: asyncio.Runner) -> None:
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
    game = play(implementation, build(implementation), runner)
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
    manager = build(implementation)
    for trajectory in play(implementation, manager, runner).trajectories:
        seen: dict[int, list[int]] = {}
        for row in manager.samples(trajectory):
            length = len(row.input_ids)
            assert length <= LIMITS.sequence_length
            assert row.input_ids.dtype == np.int32
            assert row.response_mask.dtype == np.bool_
            assert row.response_mask.shape == row.turn.shape == row.versions.shape == (length,)
            assert row.logprobs is not None
            assert row.logprobs.shape == (length,)
            assert not row.response_mask[0], (
                "the first token of a row is marked as sampled; a token needs one before it."
            )
            assert (row.turn[~row.response_mask] == -1).all(), "turn must be −1 where nothing was sampled."
            assert (row.versions[row.response_mask] >= 0).all(), "a sampled token has no policy version."
            for turn, token in zip(row.turn[row.response_mask], row.input_ids[row.response_mask]):
                seen.setdefault(int(turn), []).append(int(token))
        expected = {k: turn.response_ids[turn.response_mask].tolist() for k, turn in enumerate(trajectory.turns)}
        assert seen == {k: ids for k, ids in expected.items() if ids}, (
            "the rows hold other sampled tokens than the turns."
        )


def test_the_rows_are_as_many_as_the_manager_declares(implementation: Subject, runner: asyncio.Runner) -> None:
    manager = build(implementation)
    declares = implementation.capabilities(ManagerCapabilities)
    most = TURNS * declares.calls_per_step if declares.row_per_turn else 1
    for trajectory in play(implementation, manager, runner).trajectories:
        rows = len(manager.samples(trajectory))
        assert rows <= most, (
            f"{rows} rows of a trajectory of {TURNS} turns, {most} declared. Fix:"
            " ManagerCapabilities(row_per_turn=True), and calls_per_step, by which `turnwise plan` counts rows."
        )


def test_a_first_prompt_over_the_limit_is_never_sent(implementation: Subject, runner: asyncio.Runner) -> None:
    manager = build(implementation)
    game = play(implementation, manager, runner, limits=evolve(LIMITS, sequence_length=7))
    assert game.sampler.calls == [], "a prompt without room was sent to the model."
    assert "length" in {trajectory.stop_reason for trajectory in game.trajectories}
    for trajectory in game.trajectories:
        assert trajectory.turns == ()
        assert manager.samples(trajectory) == []


def test_a_failing_environment_is_not_swallowed(implementation: Subject, runner: asyncio.Runner) -> None:
    manager = build(implementation)
    for failure in ("raise", "nan", "nontext"):
        with pytest.raises(EnvironmentFailure):
            play(implementation, manager, runner, fails=failure)


def test_episodes_do_not_meet(implementation: Subject, runner: asyncio.Runner) -> None:
    manager = build(implementation)
    alone = [play(implementation, manager, runner, seed).trajectories for seed in range(3)]

    async def together() -> list[Any]:
        return await asyncio.gather(
            *[
                manager.run(episode(seed, samplers=opponents(implementation, seed)), RecordingSampler(seed))
                for seed in range(3)
            ]
        )

    for first, second in zip(alone, map(_listed, runner.run(together()))):
        for one, other in zip(first, second, strict=True):
            assert [t.text for t in one.turns] == [t.text for t in other.turns], (
                "an episode changes when others play at the same time."
            )
            for row, same in zip(manager.samples(one), manager.samples(other), strict=True):
                np.testing.assert_array_equal(row.input_ids, same.input_ids)


def test_images_are_kept_once_and_named_by_index(implementation: Subject, runner: asyncio.Runner) -> None:
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
    manager = build(implementation)
    game = play(implementation, manager, runner, input="messages")
    texts = [turn.text for trajectory in game.trajectories for turn in trajectory.turns]
    assert sorted(texts) == sorted(answer.text for answer in game.sampler.answers)
    for call in game.sampler.calls:
        assert call["ids"] is None
        assert call["messages"], "a backend that takes messages was given none."
        assert all({"role", "content"} <= message.keys() for message in call["messages"])
