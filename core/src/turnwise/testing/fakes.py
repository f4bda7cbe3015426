"""One small deterministic fake of every kind, so that the whole loop runs in seconds without torch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from attrs import field, frozen, validators

from turnwise.contracts.batch_adjust import AdjustContext, AdjustInput, PlannedUpdate
from turnwise.contracts.chat import Message
from turnwise.contracts.env_manager import Episode, ManagerContext, Sampler
from turnwise.contracts.environment import Response
from turnwise.contracts.estimator import EstimatorContext
from turnwise.contracts.group_filter import FilterContext
from turnwise.contracts.logger import LoggerContext
from turnwise.contracts.loss import LossContext, LossView
from turnwise.data.batch import Batch, Table
from turnwise.data.ops import segment_means, trains, trajectories_to_tokens
from turnwise.data.trajectory import Generation, Sample, StopReason, Trajectory, Turn, int32
from turnwise.testing.fake_model import FakeBackend, FakeBackendConfig, FakeChat, FakeModelSource, FakeStrategy
from turnwise.testing.fake_runtime import FakeRole, FakeRuntime

__all__ = [
    "FakeBackend",
    "FakeBackendConfig",
    "FakeBatchAdjust",
    "FakeChat",
    "FakeEnvManager",
    "FakeEnvironment",
    "FakeEstimator",
    "FakeFilterConfig",
    "FakeGroupFilter",
    "FakeLogger",
    "FakeLoggerConfig",
    "FakeLoss",
    "FakeModelSource",
    "FakeRole",
    "FakeRuntime",
    "FakeStrategy",
]

Failure = Literal["none", "raise", "hang", "nan", "nontext"]


class FakeEnvironment:
    """A counting game: `length` turns, each worth `reward` times the share of `target` among the characters of the
    action.

    `fails` at turn `fails_at` (0: reset) of episodes whose seed is a multiple of `fails_every`: `raise`, `hang` (for
    `hang` seconds, then it goes on), `nan` (as the reward) or `nontext` (as the observation; at reset both are the
    observation). `success`: at least half of the possible score. `tasks`: makes it a data-set environment of that many
    rows. `images`: observations hold a 2×2 image. `truncates`: the last turn is a time limit, not an end.
    """

    def __init__(
        self,
        length: int = 3,
        target: str = "a",
        reward: float = 1.0,
        fails: Failure = "none",
        fails_at: int = 1,
        fails_every: int = 1,
        hang: float = 3600.0,
        tasks: int = 0,
        images: bool = False,
        truncates: bool = False,
    ) -> None:
        self._length, self._target, self._reward, self._images = length, target, reward, images
        self._truncates = truncates
        self._fails, self._fails_at, self._fails_every, self._hang = fails, fails_at, fails_every, hang
        self._seed, self._turn, self._score, self._start = 0, 0, 0.0, 0
        if tasks:
            self.num_tasks = tasks

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start counting at a number that the seed (and the task's index) draws."""
        self._seed, self._turn, self._score = seed or 0, 0, 0.0
        self._start = int(np.random.default_rng([self._seed, (options or {}).get("index", 0)]).integers(1000))
        failure = self._failure()
        return self._observation() if failure == "none" else math.nan, self._info(done=False)

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Count on and reward the target letters of the action."""
        self._turn += 1
        failure = self._failure()
        reward = self._reward * action.count(self._target) / max(len(action), 1)
        self._score += reward
        done = self._turn >= self._length
        observation = math.nan if failure == "nontext" else self._observation()
        ends = (False, done) if self._truncates else (done, False)
        return observation, math.nan if failure == "nan" else reward, *ends, self._info(done)

    def _failure(self) -> Failure:
        """What goes wrong at this turn; `raise` and `hang` happen here."""
        if self._turn != self._fails_at or self._seed % self._fails_every:
            return "none"
        if self._fails == "raise":
            raise RuntimeError(f"the fake environment raises at turn {self._turn}")
        if self._fails == "hang":
            time.sleep(self._hang)
            return "none"
        return self._fails

    def _observation(self) -> Any:
        text = f"count {self._start + self._turn}"
        if not self._images:
            return text
        return [{"type": "text", "text": text}, {"type": "image", "image": np.full((2, 2, 3), self._turn, np.uint8)}]

    def _info(self, done: bool) -> dict[str, Any]:
        info: dict[str, Any] = {
            "state_key": (self._start, self._turn),
            "actions": ("a", "b"),
            "answer": self._target,
            "metrics": {"count": float(self._turn)},
        }
        return info | ({"success": self._score >= self._reward * self._length / 2} if done else {})

    def render(self) -> np.ndarray:
        """A 2×2 image, brighter with every turn."""
        return np.full((2, 2, 3), min(255, 10 * self._turn), np.uint8)

    def close(self) -> None:
        """Nothing to release."""


class FakeEnvManager:
    """Plays a dialogue without templates, one sample per trajectory: prompt, response, observation, response, …"""

    def __init__(self, config: None, context: ManagerContext) -> None:
        self._context = context

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        """Play until the environment ends, the turns are used up, or no token has room."""
        observation, info = await episode.environment.reset()
        messages: list[Message] = [{"role": "user", "content": observation}]
        images = _images(observation)
        prompt = int32([]) if episode.chat is None else episode.chat.render(messages, images)
        turns: list[Turn] = []
        stop: StopReason = "turns"
        success: bool | None = None
        while len(turns) < episode.limits.max_turns:
            limits = episode.limits
            limit = min(limits.max_new_tokens, limits.max_tokens_per_step, limits.sequence_length - len(prompt))
            if limit <= 0:
                stop = "length"
                break
            asked = {"messages": list(messages)} if episode.chat is None else {"ids": prompt}
            generation = await sampler.generate(
                turn=len(turns),
                images=tuple(images),
                max_new_tokens=limit,
                actions=tuple(info.get("actions", ())),
                **asked,
            )
            # Before the step, which replaces both: they are what the response answered.
            seen, anchor = observation, info.get("state_key", observation)
            observation, reward, terminated, truncated, info = await episode.environment.step(
                generation.text, Response.of(generation)
            )
            turns.append(_turn(prompt, generation, reward, anchor, seen, len(images)))
            success = info.get("success", success)
            if terminated or truncated:
                stop = "terminated" if terminated else "truncated"
                break
            new = _images(observation)
            message: Message = {"role": "user", "content": observation}
            messages += [{"role": "assistant", "content": generation.text}, message]
            if episode.chat is not None:
                # Sampled ids are carried on and never encoded again: the text may have other tokens.
                so_far = np.concatenate([prompt, turns[-1].response_ids])
                prompt = np.concatenate([so_far, episode.chat.extend(so_far, generation.finish, [message], new)])
            images += new
        return Trajectory(
            episode.tag,
            episode.group,
            episode.member,
            episode.seed,
            tuple(turns),
            stop,
            success,
            episode.attempt,
            tuple(images),
            observation,
        )

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        """One row: the last prompt and its response hold all that came before."""
        if not any(turn.response_mask.any() for turn in trajectory.turns):
            return []
        last = trajectory.turns[-1]
        ids = np.concatenate([last.prompt_ids, last.response_ids])
        turn, versions, logprobs = (
            np.full(len(ids), -1, np.int32),
            np.full(len(ids), -1, np.int32),
            np.zeros(len(ids), np.float32),
        )
        for k, played in enumerate(trajectory.turns):
            # Each turn's prompt begins the row: its length is the place of its response.
            at = slice(len(played.prompt_ids), len(played.prompt_ids) + len(played.response_ids))
            turn[at], versions[at] = np.where(played.response_mask, k, -1), played.versions
            logprobs[at] = np.where(played.response_mask, np.nan if played.logprobs is None else played.logprobs, 0)
        # One turn without log-probs leaves the whole row without: a column is complete or absent.
        known = not np.isnan(logprobs).any()
        return [Sample(ids, turn >= 0, turn, logprobs if known else None, versions, last.images)]


def _turn(
    prompt: np.ndarray, generation: Generation, reward: float, anchor: Any, observation: Any, images: int
) -> Turn:
    ids = int32([]) if generation.ids is None else generation.ids
    versions = int32([0] * len(ids)) if generation.versions is None else generation.versions
    return Turn(
        prompt_ids=prompt,
        response_ids=ids,
        response_mask=np.ones(len(ids), np.bool_),
        logprobs=generation.logprobs,
        versions=versions,
        reward=reward,
        anchor=anchor,
        observation=observation,
        text=generation.text,
        action=generation.text,
        finish=generation.finish,
        images=tuple(range(images)),
    )


def _images(observation: Any) -> list[np.ndarray]:
    parts = observation if isinstance(observation, list) else []
    return [part["image"] for part in parts if part.get("type") == "image"]


class FakeEstimator:
    """The score minus the mean of its group, on every sampled token."""

    token_rewards = False
    whiten = False
    normalization = None

    def __init__(self, config: None, context: EstimatorContext) -> None:
        self._context = context

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(advantages, returns), float64 [T]; the return is the score."""
        scores, counts = batch.trajectories["scores"], trains(batch)
        # Groups may have any numbers, and bincount wants dense ones.
        _, group = np.unique(batch.trajectories["traj_group_id"], return_inverse=True)
        mean = segment_means(scores[counts], group[counts], len(scores))
        return trajectories_to_tokens(batch, scores - mean[group]), trajectories_to_tokens(batch, scores)


class FakeLoss:
    """−A·(1 + r + r²/2), the log-ratio r in the first terms of its exponential: arithmetic alone, so it works on tensors
    and arrays alike."""

    def __init__(self, config: None, context: LossContext) -> None:
        self._context = context

    def loss(self, view: LossView) -> tuple[Any, Mapping[str, Any]]:
        """(loss [R], no metrics)."""
        return -view.advantages * (1 + view.log_ratio + view.log_ratio * view.log_ratio / 2), {}


class FakeBatchAdjust:
    """Shuffles the rows and deals them into as many updates as units fit into the rollout batch (at least one)."""

    def __init__(self, config: None, context: AdjustContext) -> None:
        self._parts = max(1, context.rollout_batch_size // context.unit)

    def plan(self, rows: AdjustInput) -> list[PlannedUpdate]:
        """Nearly equal parts, every row once with weight 1."""
        order = np.random.default_rng(rows.seed).permutation(len(rows.trajectory))
        return [PlannedUpdate(np.sort(part), np.ones(len(part))) for part in np.array_split(order, self._parts)]

    def updates(self, rows: int) -> int:
        """The number of parts."""
        return self._parts


@frozen
class FakeFilterConfig:
    """`drop_even`: drop the groups of even number."""

    drop_even: bool = False


class FakeGroupFilter:
    """Keeps everything, or the groups of odd number."""

    def __init__(self, config: FakeFilterConfig, context: FilterContext) -> None:
        self._drop_even = config.drop_even

    def keep(self, trajectories: Table) -> np.ndarray:
        """bool [N]."""
        return (trajectories["group"] % 2 == 1) | (not self._drop_even)


@frozen
class FakeLoggerConfig:
    """`fails_at`: the step at which `scalars` raises (null: never)."""

    fails_at: int | None = field(default=None, validator=validators.optional(validators.ge(0)))


class FakeLogger:
    """Remembers what it was given; `latest` is the logger that was built last in this process."""

    latest: ClassVar[FakeLogger | None] = None

    def __init__(self, config: FakeLoggerConfig, context: LoggerContext) -> None:
        self._config = config
        self.context = context
        self.metrics: dict[int, dict[str, float]] = {}
        self.played: dict[tuple[int, str], list[Trajectory]] = {}
        self.artifacts: list[tuple[int, str, Path]] = []
        self.resumed: list[int] = []
        self.closed = 0
        FakeLogger.latest = self

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Merge the metrics into those of the step."""
        if step == self._config.fails_at:
            raise RuntimeError(f"the fake logger raises at step {step}")
        self.metrics.setdefault(step, {}).update(metrics)

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        """Keep the trajectories."""
        self.played.setdefault((step, split), []).extend(trajectories)

    def artifact(self, step: int, name: str, path: Path) -> None:
        """Keep the name and the path."""
        self.artifacts.append((step, name, path))

    def resume(self, step: int) -> None:
        """Drop what is at `step` or later."""
        self.resumed.append(step)
        self.metrics = {at: kept for at, kept in self.metrics.items() if at < step}
        self.played = {key: kept for key, kept in self.played.items() if key[0] < step}
        self.artifacts = [kept for kept in self.artifacts if kept[0] < step]

    def close(self) -> None:
        """Count the calls."""
        self.closed += 1
