"""Environment managers: they play an episode between an environment and a model, and cut the trajectory into samples."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from attrs import frozen

from turnwise.contracts.chat import Chat, Message
from turnwise.data.trajectory import Generation, Sample, Trajectory


@frozen
class Limits:
    """Token and turn limits of an episode. A call may generate the smallest of `max_new_tokens`, `max_tokens_per_step` and the
    room left; a prompt may hold `sequence_length − max_new_tokens` tokens where a manager renders each turn anew."""

    sequence_length: int
    max_new_tokens: int
    max_tokens_per_step: int
    max_turns: int

    @property
    def max_prompt_length(self) -> int:
        """The longest prompt that leaves room for `max_new_tokens`."""
        return self.sequence_length - self.max_new_tokens


class EpisodeEnvironment(Protocol):
    """The environment as a manager sees it: timeouts, threads and checks of the returned values are behind it.

    Both raise EnvironmentFailure when the environment raised, hung or returned bad values; a manager lets it pass."""

    async def reset(self) -> tuple[Any, dict[str, Any]]:
        """Reset with the episode's seed and options."""
        ...

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One checked step."""
        ...


@frozen(eq=False)
class Episode:
    """One episode to play. `chat` is None when the backend takes messages."""

    environment: EpisodeEnvironment
    chat: Chat | None
    limits: Limits
    tag: str
    group: int
    member: int
    attempt: int
    seed: int


class Sampler(Protocol):
    """The model as a manager sees it: generating arguments, request seed, order and version are added behind it."""

    input: str
    """`ids` or `messages`: what `generate` must be given."""

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
        """Sample the response of turn `turn`."""
        ...


@frozen
class ManagerContext:
    """What a manager is built with: the tag and its turn limit (for the templates)."""

    tag: str = ""
    max_turns: int = 1


class EnvManager(Protocol):
    """Built as `Manager(config, context)`, once per tag; it holds no state between episodes.

    Optional `row_per_turn`: True if an episode gives up to one row for each turn and not one in all; `turnwise plan` counts rows by it.
    A config class with the boolean field `detect_drift` says that the manager can compare the tokens of its prompts with a rendering of
    their messages: each turn then has the metric `drift` (1 where they differ) and, where they do, `extras["drift"]` with the texts
    `used` and `rendered` from the first difference on. `turnwise check` tries it.
    """

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        """Play the episode to its end."""
        ...

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        """The training rows of a finished trajectory (none if nothing was sampled)."""
        ...
