"""What a scheduler is given and what it gives back: tags to play, settings, and one batch of trajectories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from attrs import Attribute, field, frozen

from turnwise.contracts.env_manager import EnvManager, Limits
from turnwise.contracts.inference import GeneratingArgs
from turnwise.data.trajectory import Sample, Trajectory
from turnwise.errors import ConfigError

StepMode = Literal["inline", "thread", "process"]


def _failure_rate(_: Any, __: Attribute[float], value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(
            f"max_env_failure_rate is {value}. Fix: choose at least 0 and less than 1 (at 1 a broken environment would be tried for ever)."
        )


@frozen(eq=False)
class TagPlan:
    """One tag to play: `groups` groups of `group_size` episodes a step.

    `build` makes one environment (picklable for `step: process`). `step`: where its calls run. `max_concurrent_steps`: how many `reset`
    and `step` calls of the tag may run at once (None: all). `num_tasks`: the rows of a data-set environment, which is reset with
    `options={"index": i}`; None for every other. `manager_builder`: makes the manager again in another process, by name.
    """

    tag: str
    build: Callable[[], Any]
    manager: EnvManager
    limits: Limits
    groups: int
    group_size: int
    step: StepMode = "thread"
    max_concurrent_steps: int | None = None
    num_tasks: int | None = None
    manager_builder: Callable[[], EnvManager] | None = None


@frozen
class RolloutSettings:
    """`seed`: the run's seed (`val_seed` for evaluation). Timeouts in seconds. `max_env_retries`: further attempts of a failed episode.
    `max_env_failure_rate`: failed attempts per episode of a batch past which the run stops, 0 ≤ rate < 1 (else ConfigError).
    `max_concurrent`: episodes alive at once in one worker, of which a stage has one or more (None: all). `evaluation`: fixed tasks, nothing
    replaced, no training samples.
    `async_generation_ratio`: how many steps ahead of the weights groups may start; 0 is synchronous."""

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


@frozen(eq=False)
class RolloutResult:
    """One batch of episodes, in (group, member) order.

    `samples[i]`: the training rows of `trajectories[i]` (empty in evaluation). `counts`: `episodes`, `turns`, `sampled_tokens` of these
    trajectories; `planned_episodes`, `attempts`, `env_failures` (failed attempts, timeouts among them), `env_timeouts`, `retries`,
    `dropped_members`, `replaced_groups`, `discarded_episodes` (whole ones of replaced groups). `frames`: (tag, group, member) → what
    `render()` returned after `reset` and after each step. `failures`: one line for each failed attempt, with its cause.
    """

    trajectories: list[Trajectory]
    samples: list[list[Sample]]
    counts: dict[str, float]
    frames: dict[tuple[str, int, int], list[Any]]
    failures: list[str]
