"""What every manager keeps: sampled tokens travel untouched, limits hold, samples are sound, failures pass, episodes do not meet."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from attrs import define, evolve, field

from turnwise.contracts.chat import Message
from turnwise.contracts.env_manager import Episode, Limits, ManagerContext
from turnwise.contracts.environment import check_reset, check_step
from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.data.trajectory import Generation, Trajectory
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

    async def reset(self) -> tuple[Any, dict[str, Any]]:
        """Reset, checked."""
        return check_reset(self.environment.reset(seed=self.seed), "fake")

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, checked; what the environment raises is an EnvironmentFailure."""
        try:
            return check_step(self.environment.step(action), "fake")
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
        self.calls.append({"turn": turn, "ids": ids, "messages": messages, "images": images, "max_new_tokens": max_new_tokens, "actions": actions})
        prompt = np.zeros(1, np.int32) if ids is None else ids
        answer = await self._backend.generate(Request(1000 * self.seed + turn, GeneratingArgs(), max_new_tokens, ids=prompt))
        if self.input == "messages":
            answer = Generation(answer.text, None, None, None, answer.finish)
        self.answers.append(answer)
        return answer


def build(implementation: Subject) -> Any:
    return implementation.build(implementation.supplied.get("context", ManagerContext(tag="fake", max_turns=TURNS)))


def episode(seed: int = 0, limits: Limits = LIMITS, chat: FakeChat | None = None, **options: Any) -> Episode:
    environment: Any = PlainEnvironment(FakeEnvironment(**options), seed)
    return Episode(environment, chat or FakeChat(), limits, "fake", 2, seed, 1, seed)


def play(manager: Any, runner: asyncio.Runner, seed: int = 0, **options: Any) -> tuple[Trajectory, RecordingSampler]:
    sampler = RecordingSampler(seed)
    return runner.run(manager.run(episode(seed, **options), sampler)), sampler


def test_the_trajectory_tells_who_it_is_and_how_it_ended(implementation: Subject, runner: asyncio.Runner) -> None:
    manager = build(implementation)
    trajectory, _ = play(manager, runner)
    assert (trajectory.tag, trajectory.group, trajectory.member, trajectory.attempt, trajectory.seed) == ("fake", 2, 0, 1, 0)
    assert (len(trajectory.turns), trajectory.stop_reason) == (TURNS, "terminated")
    assert isinstance(trajectory.success, bool | np.bool_), "info['success'] of the last step did not reach the trajectory."
    longer, _ = play(manager, runner, length=50)
    assert (len(longer.turns), longer.stop_reason) == (TURNS, "turns")


def test_sampled_tokens_and_their_log_probs_travel_untouched(implementation: Subject, runner: asyncio.Runner) -> None:
    trajectory, sampler = play(build(implementation), runner)
    for turn, answer, call in zip(trajectory.turns, sampler.answers, sampler.calls, strict=True):
        assert answer.ids is not None
        assert answer.logprobs is not None
        mask = turn.response_mask
        assert turn.response_ids.shape == mask.shape == turn.versions.shape
        assert turn.logprobs is not None
        np.testing.assert_array_equal(turn.response_ids[mask], answer.ids, "sampled ids were changed (decoded and encoded again?).")
        np.testing.assert_array_equal(turn.logprobs[mask], answer.logprobs, "log-probs were changed.")
        np.testing.assert_array_equal(turn.prompt_ids, call["ids"], "prompt_ids are not what the model was given.")
        assert np.isfinite(turn.reward)


def test_calls_respect_every_limit(implementation: Subject, runner: asyncio.Runner) -> None:
    _, sampler = play(build(implementation), runner)
    for turn, call in enumerate(sampler.calls):
        assert call["turn"] == turn
        assert 0 < call["max_new_tokens"] <= min(LIMITS.max_new_tokens, LIMITS.max_tokens_per_step)
        assert len(call["ids"]) + call["max_new_tokens"] <= LIMITS.sequence_length
        assert call["ids"].dtype == np.int32
        assert call["actions"] == ("a", "b"), "the legal actions of info['actions'] did not reach the sampler."


def test_samples_hold_every_sampled_token_once(implementation: Subject, runner: asyncio.Runner) -> None:
    manager = build(implementation)
    trajectory, _ = play(manager, runner)
    rows = manager.samples(trajectory)
    seen: dict[int, list[int]] = {}
    for row in rows:
        length = len(row.input_ids)
        assert length <= LIMITS.sequence_length
        assert row.input_ids.dtype == np.int32
        assert row.response_mask.dtype == np.bool_
        assert row.response_mask.shape == row.turn.shape == row.versions.shape == (length,)
        assert row.logprobs is not None
        assert row.logprobs.shape == (length,)
        assert not row.response_mask[0], "the first token of a row is marked as sampled; a token needs one before it."
        assert (row.turn[~row.response_mask] == -1).all(), "turn must be −1 where nothing was sampled."
        assert (row.versions[row.response_mask] >= 0).all(), "a sampled token has no policy version."
        for turn, token in zip(row.turn[row.response_mask], row.input_ids[row.response_mask]):
            seen.setdefault(int(turn), []).append(int(token))
    expected = {k: turn.response_ids[turn.response_mask].tolist() for k, turn in enumerate(trajectory.turns)}
    assert seen == {k: ids for k, ids in expected.items() if ids}, "the rows hold other sampled tokens than the turns."


def test_the_rows_are_as_many_as_the_manager_declares(implementation: Subject, runner: asyncio.Runner) -> None:
    manager = build(implementation)
    rows = len(manager.samples(play(manager, runner)[0]))
    most = TURNS if getattr(manager, "row_per_turn", False) else 1
    assert rows <= most, f"{rows} rows of an episode of {TURNS} turns. Fix: row_per_turn = True, by which `turnwise plan` counts rows."


def test_a_first_prompt_over_the_limit_is_never_sent(implementation: Subject, runner: asyncio.Runner) -> None:
    manager = build(implementation)
    trajectory, sampler = play(manager, runner, limits=evolve(LIMITS, sequence_length=7))
    assert sampler.calls == [], "a prompt without room was sent to the model."
    assert (trajectory.turns, trajectory.stop_reason) == ((), "length")
    assert manager.samples(trajectory) == []


def test_a_failing_environment_is_not_swallowed(implementation: Subject, runner: asyncio.Runner) -> None:
    manager = build(implementation)
    for failure in ("raise", "nan", "nontext"):
        with pytest.raises(EnvironmentFailure):
            play(manager, runner, fails=failure)


def test_episodes_do_not_meet(implementation: Subject, runner: asyncio.Runner) -> None:
    manager = build(implementation)
    alone = [play(manager, runner, seed)[0] for seed in range(3)]

    async def together() -> list[Trajectory]:
        return await asyncio.gather(*[manager.run(episode(seed), RecordingSampler(seed)) for seed in range(3)])

    for one, other in zip(alone, runner.run(together())):
        assert [t.text for t in one.turns] == [t.text for t in other.turns], "an episode changes when others play at the same time."
        for first, second in zip(manager.samples(one), manager.samples(other), strict=True):
            np.testing.assert_array_equal(first.input_ids, second.input_ids)


def test_images_are_kept_once_and_named_by_index(implementation: Subject, runner: asyncio.Runner) -> None:
    manager = build(implementation)
    trajectory, sampler = play(manager, runner, images=True)
    assert sampler.calls[0]["images"], "the first observation's image did not reach the sampler."
    count = len(trajectory.images)
    assert all(image.dtype == np.uint8 and image.ndim == 3 for image in trajectory.images)
    for turn, call in zip(trajectory.turns, sampler.calls, strict=True):
        assert len(turn.images) == len(call["images"])
        assert all(0 <= index < count for index in turn.images)
    assert all(0 <= index < count for row in manager.samples(trajectory) for index in row.images)


def test_a_backend_of_messages_gets_messages(implementation: Subject, runner: asyncio.Runner) -> None:
    manager = build(implementation)
    sampler = RecordingSampler(0, input="messages")
    trajectory = runner.run(manager.run(evolve(episode(), chat=None), sampler))
    assert [turn.text for turn in trajectory.turns] == [answer.text for answer in sampler.answers]
    for call in sampler.calls:
        assert call["ids"] is None
        assert call["messages"], "a backend that takes messages was given none."
        assert all({"role", "content"} <= message.keys() for message in call["messages"])
