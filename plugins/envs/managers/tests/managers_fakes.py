"""A chat that remembers, scripted environments and samplers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.contracts.chat import Message
from turnwise.contracts.env_manager import Episode, Limits
from turnwise.contracts.environment import Response
from turnwise.data.trajectory import Generation, Trajectory
from turnwise.testing.fake_model import END, ROLES, FakeChat
from turnwise_managers.config import StepwiseConfig, TrajectoryConfig
from turnwise_managers.stepwise import StepwiseManager
from turnwise_managers.trajectory import TrajectoryManager

KINDS = {"trajectory": (TrajectoryManager, TrajectoryConfig), "stepwise": (StepwiseManager, StepwiseConfig)}
"""What each manager is built of: its class and its options."""


class WatchedChat(FakeChat):
    """The fake chat, which remembers the arguments, tools and images that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.args: dict[str, Any] = {}
        self.tools: Any = "never rendered"
        self.images: list[tuple[np.ndarray, ...]] = []

    def with_args(self, args: Mapping[str, Any]) -> WatchedChat:
        self.args = dict(args)
        return self

    def render(self, messages: Sequence[Message], images: Sequence[np.ndarray] = (), tools: Any = None) -> np.ndarray:
        self.tools = tools
        self.images.append(tuple(images))
        return super().render(messages)

    def extend(
        self, ids: np.ndarray, finish: str, messages: Sequence[Message], images: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        self.images.append(tuple(images))
        return super().extend(ids, finish, messages)


def text_ids(text: str) -> list[int]:
    return list(text.encode())


def prompt(*messages: tuple[str, str]) -> list[int]:
    """The ids of text messages and the assistant's header, written out."""
    return [i for role, text in messages for i in [ROLES[role], *text_ids(text), END]] + [ROLES["assistant"]]


class ScriptedEnv:
    """`first` is what reset returns; `steps` what each step returns, (observation, reward, terminated, truncated,
    info)."""

    def __init__(
        self, first: Any = "start", steps: Iterable[tuple[Any, ...]] = (), info: dict[str, Any] | None = None
    ) -> None:
        self.first, self.info, self.steps = first, info or {}, list(steps)
        self.actions: list[str] = []
        self.responses: list[Response | None] = []

    async def reset(self) -> tuple[Any, dict[str, Any]]:
        return self.first, self.info

    async def step(
        self, action: str, response: Response | None = None
    ) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.responses.append(response)
        observation, reward, terminated, truncated, info = self.steps[len(self.actions) - 1]
        return observation, reward, terminated, truncated, info


def going(*observations: Any, reward: float = 0.0) -> list[tuple[Any, ...]]:
    """Steps that end nothing."""
    return [(observation, reward, False, False, {}) for observation in observations]


class ScriptedSampler:
    """Answers with the given texts, each closed by a sampled END unless it is cut; log-prob −turn−i/100, version
    10·turn+i."""

    def __init__(
        self, texts: Sequence[str], takes: str = "ids", change: Callable[[Generation], Generation] = lambda g: g
    ) -> None:
        self.texts, self.input, self.change = list(texts), takes, change
        self.calls: list[dict[str, Any]] = []

    async def generate(self, **call: Any) -> Generation:
        self.calls.append(call)
        turn = call["turn"]
        assert turn == len(self.calls) - 1
        text = self.texts[turn]
        if self.input == "messages":
            assert call["ids"] is None
            return self.change(Generation(text, None, None, None, "stop"))
        assert call["messages"] is None
        assert call["max_new_tokens"] > 0
        ids = ([*text_ids(text), END] if text else [])[: call["max_new_tokens"]]
        count = np.arange(len(ids))
        finish = "stop" if ids and ids[-1] == END else "length"
        logprobs = (-turn - count / 100).astype(np.float32)
        shown = FakeChat().decode(np.array(ids))
        return self.change(
            Generation(shown, np.array(ids, np.int32), logprobs, (10 * turn + count).astype(np.int32), finish)
        )


ROOMY = Limits(sequence_length=1000, max_new_tokens=50, max_tokens_per_step=50, max_turns=10)


def episode(env: Any, limits: Limits = ROOMY, chat: Any = None) -> Episode:
    return Episode(
        environment=env, chat=chat or WatchedChat(), limits=limits, tag="Tag", group=7, member=3, attempt=1, seed=11
    )


def run(manager: Any, env: Any, sampler: Any, limits: Limits = ROOMY, chat: Any = None) -> Trajectory:
    return asyncio.run(manager.run(episode(env, limits, chat), sampler))


def image(value: int) -> np.ndarray:
    return np.full((2, 3, 3), value, np.uint8)


def image_part(value: int) -> dict[str, Any]:
    return {"type": "image", "image": image(value)}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
