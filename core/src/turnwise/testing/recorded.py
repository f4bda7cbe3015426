"""An episode of a manager under test: the fake environment, the model and what further models play, with all that was
asked and answered written down."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from attrs import define, evolve, field

from turnwise.contracts.chat import Message
from turnwise.contracts.env_manager import Episode, Limits
from turnwise.contracts.environment import Response, check_reset, check_step
from turnwise.contracts.inference import GeneratingArgs, InferenceContext, Request
from turnwise.data.trajectory import Generation, Trajectory, Turn
from turnwise.errors import EnvironmentFailure
from turnwise.testing.fakes import FakeBackend, FakeBackendConfig, FakeChat, FakeEnvironment
from turnwise.testing.subject import Subject

TURNS = 3
LIMITS = Limits(sequence_length=8192, max_new_tokens=6, max_tokens_per_step=5, max_turns=TURNS)


@define
class PlainEnvironment:
    """The fake environment as a manager sees it. `infos` and `observations`: what it told and
    showed, at reset and at every step."""

    environment: FakeEnvironment
    seed: int
    steps: list[tuple[str, Response | None, float]] = field(factory=list)
    infos: list[dict[str, Any]] = field(factory=list)
    observations: list[Any] = field(factory=list)

    async def reset(self) -> tuple[Any, dict[str, Any]]:
        """Reset, checked."""
        answer = check_reset(self.environment.reset(seed=self.seed), "fake")
        self.observations.append(answer[0])
        self.infos.append(answer[1])
        return answer

    async def step(
        self, action: str, response: Response | None = None
    ) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, checked; what the environment raises is an EnvironmentFailure."""
        try:
            answer = check_step(self.environment.step(action), "fake")
            self.steps.append((action, response, answer[1]))
            self.observations.append(answer[0])
            self.infos.append(answer[4])
            return answer
        except RuntimeError as error:
            raise EnvironmentFailure(str(error)) from error


@define
class RecordingSampler:
    """Samples with the fake backend and writes down every call; with `input: messages` it answers with text alone.

    Each call has weights of its own version. `world`: the environment whose steps before each call are counted."""

    seed: int
    input: str = "ids"
    world: PlainEnvironment | None = None
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
                "step": 0 if self.world is None else len(self.world.steps),
            }
        )
        prompt = np.zeros(1, np.int32) if ids is None else ids
        answer = await self._backend.generate(
            Request(1000 * self.seed + turn, GeneratingArgs(), max_new_tokens, ids=prompt)
        )
        assert answer.ids is not None
        # So that a test sees whether a turn has kept the versions of its own call.
        answer = evolve(answer, versions=np.full(len(answer.ids), len(self.calls), np.int32))
        if self.input == "messages":
            answer = Generation(answer.text, None, None, None, answer.finish)
        self.answers.append(answer)
        return answer


def opponents(implementation: Subject, seed: int) -> dict[str, RecordingSampler]:
    """The further models that the author's fixture names under `samplers`."""
    return {
        name: RecordingSampler(seed + 500 + k, "messages")
        for k, name in enumerate(implementation.supplied.get("samplers", ()))
    }


def episode(
    seed: int = 0, limits: Limits = LIMITS, chat: FakeChat | None = None, samplers: Any = None, **options: Any
) -> Episode:
    """An episode of the fake environment with these options."""
    environment: Any = PlainEnvironment(FakeEnvironment(**options), seed)
    return Episode(environment, chat or FakeChat(), limits, "fake", 2, seed, 1, seed, samplers or {})


@define
class Game:
    """One episode as it was played: its trajectories, the run's own sampler, and the environment with its steps.

    `alone`: no other model played, and one trajectory holds all: what the environment told is that trajectory's."""

    trajectories: list[Trajectory]
    sampler: RecordingSampler
    world: PlainEnvironment
    alone: bool

    @property
    def steps(self) -> list[tuple[str, Response | None, float]]:
        """(action, response, reward) of every step."""
        return self.world.steps

    @property
    def calls(self) -> list[tuple[Turn, dict[str, Any], Generation]]:
        """(turn, what was asked, the answer) for every turn of every trajectory, matched by the tokens."""
        left = list(zip(self.sampler.calls, self.sampler.answers, strict=True))
        found = []
        for turn in [turn for trajectory in self.trajectories for turn in trajectory.turns]:
            # Matched by what was asked and answered: lines of several roles call in an order of their own.
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
    """Play one episode of the fake environment with these options to its end."""
    others = opponents(implementation, seed)
    played = episode(seed, samplers=others, **options)
    if input == "messages":
        played = evolve(played, chat=None)
    world: Any = played.environment
    sampler = RecordingSampler(seed, input, world)
    trajectories = listed(runner.run(manager.run(played, sampler)))
    return Game(trajectories, sampler, world, alone=len(trajectories) == 1 and not others)


def listed(played: Trajectory | list[Trajectory]) -> list[Trajectory]:
    """What `run` returned, as a list of trajectories of different roles."""
    trajectories = [played] if isinstance(played, Trajectory) else played
    roles = [trajectory.role for trajectory in trajectories]
    assert len(set(roles)) == len(roles) > 0, (
        f"run returned trajectories of the roles {roles}; each needs one of its own."
    )
    return trajectories
