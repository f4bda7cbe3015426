"""Rollouts as data (tags to play, settings, one attempt at an episode, a batch of trajectories), and the executor that
plays them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import numpy as np
from attrs import Attribute, define, field, frozen

from turnwise.contracts.env_manager import EnvManager, Limits
from turnwise.contracts.inference import GeneratingArgs, InferenceBackend
from turnwise.data.trajectory import Generation, Sample, Trajectory
from turnwise.errors import ConfigError, EnvironmentFailure, TurnwiseError

StepMode = Literal["inline", "thread", "process"]

Frame = np.ndarray | str
"""What an environment's `render()` returns: uint8 H×W×3, or text."""


def _failure_rate(_: object, __: Attribute[float], value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(
            f"max_env_failure_rate is {value}. Fix: choose at least 0 and less than 1 (at 1 a broken environment would"
            " be tried for ever)."
        )


@frozen(eq=False)
class TagPlan:
    """One tag to play: `groups` groups of `group_size` episodes a step.

    `build` makes one environment (picklable for `step: process`). `step`: where its calls run. `max_concurrent_steps`:
    how many `reset` and `step` calls of the tag may run at once (None: all). `num_tasks`: the rows of a data-set
    environment, which is reset with `options={"index": i}`; None for every other. `manager_builder`: makes the manager
    again in another process, by name.
    `samplers`: make the further models of its episodes, players that take messages (Episode.samplers). `replayable`: as
    the environment says of itself.
    """

    tag: str
    build: Callable[[], Any]  # Any: an environment's methods may be coroutines, which no one protocol says
    manager: EnvManager
    limits: Limits
    groups: int
    group_size: int
    step: StepMode = "thread"
    max_concurrent_steps: int | None = None
    num_tasks: int | None = None
    manager_builder: Callable[[], EnvManager] | None = None
    samplers: Mapping[str, Callable[[], InferenceBackend]] = field(factory=dict)
    replayable: bool = True


@frozen
class RolloutSettings:
    """`seed`: the run's seed (`val_seed` for evaluation). Timeouts in seconds. `max_env_retries`: further attempts of a
    failed episode.
    `max_env_failure_rate`: failed attempts per episode of a batch past which the run stops, 0 ≤ rate < 1 (else
    ConfigError).
    `max_concurrent`: episodes alive at once in one worker, of which an executor has one or more (None: all).
    `evaluation`: fixed tasks, nothing replaced, no training samples.
    `async_generation_ratio`: how many steps ahead of the weights groups may start; 0 is synchronous. `max_steps`: the
    steps of the run, past which no group is started (None: no end). `stall_timeout`: seconds in which no episode moves
    before the batch fails. `weight_update`: when new weights may come to what plays ahead."""

    seed: int
    step_timeout: float = 60.0
    reset_timeout: float = 60.0
    request_timeout: float = 600.0
    max_env_retries: int = 2
    max_env_failure_rate: float = field(default=0.2, validator=_failure_rate)
    max_concurrent: int | None = None
    evaluation: bool = False
    generating_args: GeneratingArgs = field(factory=GeneratingArgs)
    async_generation_ratio: int = 0
    max_steps: int | None = None
    stall_timeout: float = math.inf
    weight_update: Literal["between_batches", "between_turns", "between_tokens"] = "between_batches"

    @property
    def cuts_episodes(self) -> bool:
        """Whether weights change, and checkpoints are written, while episodes are open."""
        return self.async_generation_ratio > 0 and self.weight_update != "between_batches" and not self.evaluation


@frozen(eq=False)
class RolloutResult:
    """One batch of episodes, in (group, member) order.

    `samples[i]`: the training rows of `trajectories[i]` (empty in evaluation). `counts`: `episodes`, `turns`,
    `sampled_tokens` of these trajectories; `planned_episodes`, `attempts`, `env_failures` (failed attempts, timeouts
    among them), `env_timeouts`, `retries`, `dropped_members`, `replaced_groups`, `discarded_episodes` (whole ones of
    replaced groups), `discarded_tokens` (sampled in those, in failed attempts and in episodes that a resumed run begins
    anew). `frames`: (tag, group, member) → what `render()` returned after `reset` and after each step.
    `failures`: one line for each failed attempt, with its cause.
    """

    trajectories: list[Trajectory]
    samples: list[list[Sample]]
    counts: dict[str, float]
    frames: dict[tuple[str, int, int], list[Frame]]
    failures: list[str]


@define(eq=False)
class Record:
    """What an attempt has behind it: the generations by their turn, and a digest of what `reset` and every `step`
    returned, in order. An attempt that is given one that holds something replays it: the same actions, from a fresh
    environment."""

    generations: dict[int, Generation] = field(factory=dict)
    digests: list[str] = field(factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of all its generations."""
        return sum(generation.tokens for generation in self.generations.values())


@frozen(eq=False)
class EpisodeSpec:
    """One attempt at one episode, as plain data: everything that its seeds follow from. `rendered`: its frames are
    wanted. `record`: replayed, and written on; None where nobody asks for it."""

    tag: str
    group: int
    member: int
    attempt: int
    seed: int
    options: dict[str, int] | None = None
    rendered: bool = False
    record: Record | None = None


@frozen(eq=False)
class Played:
    """A finished episode: its trajectories, one for each role, the training samples of each (none in evaluation), and
    frames (None if they were not wanted)."""

    trajectories: list[Trajectory]
    samples: list[list[Sample]]
    frames: list[Frame] | None


class EnvironmentTimeout(EnvironmentFailure):
    """A call to an environment did not return in time."""


class ReplayDiffers(EnvironmentFailure):
    """An environment did not do again what it had done for the same seed and actions."""


class WorkerLost(EnvironmentFailure):
    """The worker that played an episode is gone. `counts`: whether this is the one episode by which the loss is counted
    as a failure of an environment; the others that the worker played are retried without being counted."""

    def __init__(self, text: str, counts: bool = True) -> None:
        super().__init__(text)
        self.counts = counts


class Executor(Protocol):
    """Plays episodes, many at once."""

    workers: int
    """How many workers there are, each of which may hold `max_concurrent` episodes."""

    async def play(self, spec: EpisodeSpec, stop: Callable[[TurnwiseError], None]) -> Played:
        """Play one attempt to its end.

        Raises EnvironmentFailure where the environment or its manager failed (the episode may be tried again), any
        other TurnwiseError where the batch cannot go on. `stop` is called with an EngineError when the backend does not answer in time,
        while the attempt still hangs."""
        ...

    def moved(self) -> int:
        """A number that changes whenever an episode begins or ends a call to its environment or to a model."""
        ...

    def waits(self) -> list[str]:
        """One line for each episode in play: `which: what it waits for, for how many seconds`."""
        ...

    def listen(self, changed: Callable[[], None]) -> None:
        """From now on call `changed` when `flying` falls while requests are held, and when `stranded` begins."""
        ...

    async def hold(self) -> None:
        """Let no new request through to the backend; those that are through are answered. Whatever begins to play from
        now on, in whichever worker, is held, too."""
        ...

    def flying(self) -> int:
        """While requests are held: how many episodes wait for the answer to one that is through. Where that is not
        known yet, all that may be."""
        ...

    async def freeze(self) -> None:
        """Let no time pass for requests: their engine is paused."""
        ...

    async def release(self) -> None:
        """Undo `hold` and `freeze`."""
        ...

    async def records(self) -> None:
        """Bring the `record` of every episode in play up to date, where another process writes on a copy of it."""
        ...

    def stranded(self) -> bool:
        """Whether nothing is answered before new weights come: the engines that had the last ones are gone."""
        ...

    async def abort(self) -> None:
        """Every `play` was cancelled: drop the requests that they waited for, without waiting for what hangs. The
        records of these episodes are brought up to date."""
        ...

    async def close(self) -> None:
        """Close every environment; may be called twice."""
        ...
