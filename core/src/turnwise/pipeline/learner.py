"""From played episodes to the last update of a step: batch, log-probs and values, advantages, critic, actor.

Numpy works on other threads, one piece after the other, so that the event loop is free for what plays meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence

import numpy as np
from attrs import evolve, frozen

from turnwise.config.schema import Role, RunConfig
from turnwise.config.updates import rows_per_update
from turnwise.contracts.batch_adjust import AdjustContext, BatchAdjust, PlannedUpdate
from turnwise.contracts.estimator import AdvantageEstimator
from turnwise.contracts.group_filter import FilterContext, GroupFilter
from turnwise.contracts.rollout import RolloutResult
from turnwise.contracts.runtime import TrainRole
from turnwise.data.batch import Batch, build_batch
from turnwise.data.ops import trains
from turnwise.data.rows import Update, UpdateResult
from turnwise.data.trajectory import Trajectory
from turnwise.errors import PluginError, boundary
from turnwise.pipeline import advantages, correction, metrics, staleness
from turnwise.pipeline.clock import Clock
from turnwise.pipeline.metrics import Reporting
from turnwise.pipeline.old_logprobs import OldLogProbs
from turnwise.pipeline.roles import Roles
from turnwise.pipeline.skipped import Skipped, TooManySkipped
from turnwise.pipeline.updates import plan_step, training_rows, updates
from turnwise.planning import assembly, builders
from turnwise.rollout import mock

log = logging.getLogger("turnwise")


@frozen(eq=False)
class Lesson:
    """What there is to learn in a step: the batch, one epoch of updates over its rows, and the metrics of both."""

    step: int
    batch: Batch
    planned: list[PlannedUpdate]
    metrics: dict[str, float]


@frozen(eq=False)
class Learnt:
    """What came of it: metrics, and the learning rates of the actor's updates in order."""

    metrics: dict[str, float]
    rates: list[float]


class Learner:
    """Knows the algorithm of the run. `kl_coef`: the coefficient of the KL penalty, which may adapt from step to step;
    a checkpoint holds it."""

    def __init__(
        self,
        config: RunConfig,
        roles: Roles,
        estimator: AdvantageEstimator,
        clock: Clock,
        kl_coef: float,
        reporting: Reporting,
    ) -> None:
        self.kl_coef = kl_coef
        self.changing = False
        """Whether the weights, or what else a checkpoint holds of the learner, are in the middle of a step."""
        self._made = 0
        self._unweighted = False
        self._config, self._roles, self._estimator, self._clock, self._reporting = (
            config,
            roles,
            estimator,
            clock,
            reporting,
        )
        self._filters: list[GroupFilter] = [
            builders.build("group_filter", one, FilterContext(seed=config.seed)) for one in config.group_filters
        ]
        self._adjust = _policy(config, config.actor_train)
        self._critic_adjust = None if roles.critic is None else _policy(config, assembly.role_of(config, "critic"))
        self._skipped = {role: Skipped(role, config.max_skipped_updates) for role in ("actor_train", "critic")}
        # Rollouts from a file are those of other weights, even where the sampler shares the trainer's.
        self._old_logprobs = OldLogProbs(config, shared=roles.transport == "shared" and not mock.mocks(config))

    async def prepare(self, step: int, played: RolloutResult) -> Lesson:
        """The batch of the episodes, filtered, and the plan of its updates."""
        return await asyncio.to_thread(self._prepare, step, played)

    def _prepare(self, step: int, played: RolloutResult) -> Lesson:
        # Clipped before anything is summed: scores, and every statistic of them, are of the clipped rewards.
        batch = build_batch(_clipped(played.trajectories, self._config.reward_clip), played.samples)
        out = metrics.batch_metrics(batch, self._reporting) | metrics.environment_metrics(
            played.trajectories, self._reporting
        )
        out |= metrics.rollout_metrics(played.counts, ahead=self._config.async_generation_ratio > 0)
        if not len(batch.samples):
            log.warning(
                "step %d: no token was sampled in %d episodes (prompts over sequence_length?), nothing is learned",
                step,
                len(batch.trajectories),
            )
        with boundary("group_filters", PluginError):
            batch = advantages.filter_groups(batch, self._filters)
        if self._filters:
            out["rollout/filtered"] = float((~trains(batch)).sum())
        if self._config.async_generation_ratio:
            out |= staleness.of_tokens(batch, step)
        return Lesson(step, batch, self._planned(batch, self._adjust, step), out)

    def _planned(self, batch: Batch, adjust: BatchAdjust, step: int) -> list[PlannedUpdate]:
        with boundary(f"batch_adjust_mode {self._config.batch_adjust_mode.name!r}", PluginError):
            return plan_step(batch, adjust, self._config.seed, step)

    async def learn(self, lesson: Lesson) -> Learnt:
        """All updates of the step, the critic's first. Every role comes on its devices when its turn is there."""
        kl_coef, self._made = self.kl_coef, 0
        try:
            return await self._learn(lesson)
        except TooManySkipped:
            # Where the step has made no update, the weights are those before it, and can be saved as that. After one
            # they are of no version: a resumed run would make it a second time.
            self.kl_coef, self.changing = kl_coef, self._made > 0
            raise

    async def _learn(self, lesson: Lesson) -> Learnt:
        step, planned = lesson.step, lesson.planned
        batch = await self._with_log_probs(lesson)
        with self._clock.phase("advantage"):
            batch = await asyncio.to_thread(self._with_advantages, batch)
        self.changing = True  # of all that a checkpoint holds, the KL coefficient is the first that moves
        out = await asyncio.to_thread(self._advantage_metrics, batch)
        if self._roles.critic is not None:
            with self._clock.phase("critic_train"):
                await self._roles.colocation.bring("critic")
                out |= await self._update_critic(self._roles.critic, batch, step)
        # After the critic, whose loss the correction does not touch.
        batch, found = await asyncio.to_thread(self._corrected, batch)
        out |= found
        with self._clock.phase("actor_train"):
            work = updates(batch, planned, self._config, self._config.actor_train, step, self._config.kl_loss_coef)
            await self._roles.colocation.bring("actor_train")
            results, rates = await self._update(self._roles.actor, work, self._skipped["actor_train"])
        self.changing = False
        out |= metrics.update_metrics(results)
        if rates:
            out["policy/learning_rate"] = rates[-1]
        out["rollout/rows_added"] = float(sum(len(u.rows) for u in planned) - len(batch.samples))
        return Learnt(out, rates)

    async def _with_log_probs(self, lesson: Lesson) -> Batch:
        """Old log-probs where they are needed, the reference's, and the critic's values."""
        batch, roles = lesson.batch, self._roles
        with self._clock.phase("old_logprobs"):
            batch = await self._old_logprobs.add(
                batch, roles, updates=len(lesson.planned) * self._config.ppo_epochs, version=lesson.step
            )
        if roles.has_reference:
            with self._clock.phase("reference"):
                values = await roles.reference_logprobs(await asyncio.to_thread(training_rows, batch))
            batch = batch.with_tokens(ref_log_probs=_spread(batch, values))
        if roles.critic is not None:
            with self._clock.phase("values"):
                values = await roles.values(await asyncio.to_thread(training_rows, batch))
            batch = batch.with_tokens(values=_spread(batch, values))
        return batch

    def _with_advantages(self, batch: Batch) -> Batch:
        if self.kl_coef > 0:
            batch = advantages.add_kl_penalty(batch, self._config, self.kl_coef)
        return advantages.with_advantages(batch, self._estimator, self._config)

    def _advantage_metrics(self, batch: Batch) -> dict[str, float]:
        return metrics.advantage_metrics(batch, self._estimator.normalization) | self._adapt_kl(batch)

    def _adapt_kl(self, batch: Batch) -> dict[str, float]:
        """The adaptive coefficient moves once a step (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""
        config = self._config
        if "ref_log_probs" not in batch.tokens or not config.init_kl_coef:
            return {}
        kl, count = advantages.mean_kl(batch, config.kl_penalty)
        used = self.kl_coef
        if config.target_kl is not None and count:
            self.kl_coef = advantages.adapted(used, kl, config.target_kl, count, config.kl_horizon)
        return {"critic/kl": kl, "critic/kl_coef": used}

    def _corrected(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        out = correction.compared(batch) if self._old_logprobs.recomputed else {}
        self._warn_of_unweighted(batch)
        batch, found = correction.corrected(batch, self._config)
        if self._config.async_generation_ratio:
            found |= staleness.effective_size(batch)
        return batch, out | found

    def _warn_of_unweighted(self, batch: Batch) -> None:
        wanted = self._config.train_infer_correction
        if self._unweighted or batch.has_infer_log_probs or wanted is None or not wanted.active:
            return
        self._unweighted = True
        log.warning(
            "the sampler gave no log-probs for some tokens (truncation by top_p, top_k?): train_infer_correction leaves"
            " their weight at 1"
        )

    async def _update_critic(self, critic: TrainRole, batch: Batch, step: int) -> dict[str, float]:
        """The critic's updates: its own U, learning rate and, for its loss, token-mean."""
        assert self._critic_adjust is not None
        config = evolve(self._config, loss_agg_mode="token-mean")
        planned = await asyncio.to_thread(self._planned, batch, self._critic_adjust, step)
        work = updates(batch, planned, config, assembly.role_of(config, "critic"), step, 0.0)
        results, rates = await self._update(critic, work, self._skipped["critic"])
        return metrics.update_metrics(results, "critic") | ({"critic/learning_rate": rates[-1]} if rates else {})

    async def _update(
        self, role: TrainRole, work: Iterator[Update], skipped: Skipped
    ) -> tuple[list[UpdateResult], list[float]]:
        """One update after the other; what came of each, and its learning rate. Raises TooManySkipped: so many in a row
        made no step."""
        results, rates = [], []
        async for update in _elsewhere(work):
            results.append(await role.update(update))
            self._made += not results[-1].skipped
            skipped.count(update, results[-1])
            rates.append(update.lr)
        return results, rates


async def _elsewhere(work: Iterator[Update]) -> AsyncIterator[Update]:
    """The updates of an iterator, each made on another thread when it is asked for: all at once would hold every row of
    the step twice."""
    while (update := await asyncio.to_thread(next, work, None)) is not None:
        yield update


def _policy(config: RunConfig, role: Role) -> BatchAdjust:
    """The batch-adjust policy with the role's own U."""
    context = AdjustContext(unit=rows_per_update(role), rollout_batch_size=config.rollout_batch_size)
    built: BatchAdjust = builders.build("batch_adjust", config.batch_adjust_mode, context)
    return built


def _clipped(played: Sequence[Trajectory], bound: float | None) -> list[Trajectory]:
    """The trajectories with the reward of every turn within ±bound; those that the loggers get keep theirs."""
    if bound is None:
        return list(played)
    return [
        evolve(t, turns=tuple(evolve(turn, reward=float(np.clip(turn.reward, -bound, bound))) for turn in t.turns))
        for t in played
    ]


def _spread(batch: Batch, values: np.ndarray) -> np.ndarray:
    """Values over the sampled tokens in row order as a token column, 0 elsewhere."""
    out = np.zeros(len(batch.tokens), np.float32)
    out[batch.tokens["response_mask"]] = values
    return out
