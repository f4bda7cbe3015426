"""Environment managers: they play an episode between an environment and a model, and cut the trajectory into
samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import numpy as np
from attrs import field, frozen

from turnwise.contracts.capabilities import Capabilities
from turnwise.contracts.chat import Chat, Message
from turnwise.contracts.environment import Info, Observation, Response
from turnwise.data.trajectory import Generation, Sample, Trajectory


@frozen
class Limits:
    """Token and turn limits of an episode. A call may generate the smallest of `max_new_tokens`, `max_tokens_per_step`
    and the room left; a prompt may hold `sequence_length − max_new_tokens` tokens where a manager renders each turn
    anew."""

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

    async def reset(self) -> tuple[Observation, Info]:
        """Reset with the episode's seed and options."""
        ...

    async def step(self, action: str, response: Response | None = None) -> tuple[Observation, float, bool, bool, Info]:
        """One checked step. `response`: the whole response that holds the action, for environments that read it."""
        ...


@frozen(eq=False)
class Episode:
    """One episode to play. `chat` is None when the backend takes messages. `samplers`: the further models of the tag,
    by the names under `custom_envs.<tag>.samplers`; they take messages and are not trained."""

    environment: EpisodeEnvironment
    chat: Chat | None
    limits: Limits
    tag: str
    group: int
    member: int
    attempt: int
    seed: int
    samplers: Mapping[str, Sampler] = field(factory=dict)


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
        """Sample one response. `turn` numbers the calls of the episode, whichever model is asked: 0, 1, …, no number
        twice, for the request's seed follows from it."""
        ...


@frozen
class ManagerContext:
    """What a manager is built with: the tag and its turn limit (for the templates)."""

    tag: str = ""
    max_turns: int = 1


@frozen
class ManagerCapabilities(Capabilities):
    """`row_per_turn`: a trajectory gives up to one row for each call, and not one in all. `calls_per_step`: calls of
    the model to a step of the environment. `roles`: of the trajectories that an episode gives, where it gives several.
    `joins_turns`: turns whose prompts continue each other share a row all the same. `drift_option`: the boolean option
    with which it compares the tokens of its prompts with a rendering of their
    messages: each turn then has the metric `drift` (1 where they differ) and, where they do, `extras["drift"]` with the
    texts `used` and `rendered` from the first difference on; `turnwise check` tries it. Empty: it has none. `columns`:
    the token columns that its samples may have, which an estimator may need."""

    kind: ClassVar[str] = "env_manager"
    row_per_turn: bool = False
    calls_per_step: int = 1
    roles: tuple[str, ...] = ()
    joins_turns: bool = False
    drift_option: str = ""
    columns: frozenset[str] = frozenset()


class EnvManager(Protocol):
    """Built as `Manager(config, context)`, once per tag; it holds no state between episodes. How it cuts rows it
    declares as ManagerCapabilities."""

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory | list[Trajectory]:
        """Play the episode to its end. Several trajectories differ in their `role`."""
        ...

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        """The training rows of a finished trajectory (none if nothing was sampled)."""
        ...
