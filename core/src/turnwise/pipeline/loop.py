"""The loop: roll out, score, advantage, adjust, train, sync, log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen

from turnwise.config.relations import rows_per_update
from turnwise.config.schema import Role, RunConfig
from turnwise.contracts.batch_adjust import AdjustContext, BatchAdjust
from turnwise.contracts.estimator import EstimatorContext
from turnwise.contracts.group_filter import FilterContext
from turnwise.data.batch import Batch, build_batch
from turnwise.data.ops import trains
from turnwise.data.rows import UpdateResult
from turnwise.data.trajectory import Trajectory
from turnwise.errors import CheckpointError, TurnwiseError
from turnwise.pipeline import advantages, assembly, checkpoint, correction, frames, guards, metrics, mock, report, transport
from turnwise.pipeline.old_logprobs import OldLogProbs
from turnwise.pipeline.residence import OwnReference, Residence
from turnwise.pipeline.tracking import Tracking
from turnwise.pipeline.updates import plan_step, training_rows, updates
from turnwise.rollout import RolloutResult

log = logging.getLogger("turnwise")


class Interrupted(TurnwiseError):
    """The user stopped the run; the message says what was saved and how to resume."""


@frozen
class Outcome:
    """How a run ended: its last checkpoint, the report, and the last metrics."""

    checkpoint: Path | None
    report: str
    metrics: Mapping[str, float]


class Pipeline:
    """One training run. `base` is the folder of the YAML, `plain` the resolved configuration for loggers and checkpoints."""

    def __init__(self, config: RunConfig, base: Path, plain: Mapping[str, Any]) -> None:
        self.config = assembly.with_seed_files(config, base)
        self.base = base
        self.plain = plain
        self.folders = assembly.Folders.of(config)
        self.saved: Path | None = None
        self.first: int | None = None  # the first step of this process, once it can train
        self._saved_step = -1
        self._stop = asyncio.Event()
        self._kl_coef = config.init_kl_coef
        self._history = report.History()

    async def run(self) -> Outcome:
        """Train to max_steps. Raises TurnwiseError (one line; `self.saved` is the newest checkpoint) or Interrupted."""
        start = checkpoint.to_resume(self.config.resume_from_checkpoint, self.folders.checkpoints)
        if start is not None:
            self._take_up(start)
        self.folders.output.mkdir(parents=True, exist_ok=True)
        with guards.alone_in(self.folders.output):
            self.runtime = assembly.runtime(self.config, self.base)
            self.tracking = Tracking(assembly.loggers(self.config, self.plain))
            try:
                with guards.stop_on_signals(self._stop):
                    await self._place_roles()
                    self.first = await self._restore(start)
                    return await self._train(self.first)
            finally:
                await self._close()

    def _take_up(self, start: checkpoint.Checkpoint) -> None:
        if start.step > self.config.max_steps:
            raise CheckpointError(f"{start.folder} is after step {start.step}, max_steps is {self.config.max_steps}. Fix: raise max_steps.")
        self.saved, self._saved_step = start.folder, start.step

    async def _place_roles(self) -> None:
        config = self.config
        source = assembly.model_source(config, self.base)
        self.model = await asyncio.to_thread(source.prepare, config.pretrain)
        self.chat = source.chat(self.model)
        self.actor = await self.runtime.place(assembly.role_plan(config, "actor_train", self.model, self.chat))
        self.backend = await self.runtime.place(assembly.role_plan(config, "actor_infer", self.model, self.chat))
        self.reference: Any = None
        if assembly.is_its_own_reference(config):
            self.reference = OwnReference(self.actor)
        elif assembly.needs_reference(config):
            self.reference = await self.runtime.place(assembly.role_plan(config, "reference", self.model, self.chat))
        self.transport = self._choose_transport()
        self.estimator = assembly.build("advantage_estimator", config.adv_estimator, EstimatorContext(seed=config.seed))
        self.filters = [assembly.build("group_filter", one, FilterContext(seed=config.seed)) for one in config.group_filters]
        self.adjust = self._policy(config.actor_train)
        self.critic, self.critic_adjust = None, None
        if "values" in self.estimator.needs:
            self.critic = await self.runtime.place(assembly.role_plan(config, "critic", self.model, self.chat))
            self.critic_adjust = self._policy(assembly.role_of(config, "critic"))
        placed = {"actor_train": self.actor, "reference": self.reference, "critic": self.critic}
        self.residence = Residence(config, placed, self.backend, one_model=self.transport == "shared")
        self.old_logprobs = OldLogProbs(config, shared=self.transport == "shared" and not mock.mocks(config))
        self.scheduler = assembly.scheduler(config, self.base, self.backend, self.chat, evaluation=False, runtime=self.runtime)
        self.evaluator = None
        if config.val_env_manager is not None and config.eval_steps:
            self.evaluator = assembly.scheduler(config, self.base, self.backend, self.chat, evaluation=True, runtime=self.runtime)

    def _policy(self, role: Role) -> BatchAdjust:
        """The batch-adjust policy with the role's own U."""
        context = AdjustContext(unit=rows_per_update(role), rollout_batch_size=self.config.rollout_batch_size)
        built: BatchAdjust = assembly.build("batch_adjust", self.config.batch_adjust_mode, context)
        return built

    def _choose_transport(self) -> str:
        return transport.choose(self.config, self.actor.transports, self.backend.transports, self.runtime.one_process)

    async def _restore(self, start: checkpoint.Checkpoint | None) -> int:
        first = 0
        if start is not None:
            for name, role in self._trained():
                await role.call("load", start.folder / name)
            self.scheduler.load_state(start.state["scheduler"])
            self._kl_coef = start.state["kl_coef"]
            self._history = report.History.from_plain(start.state["history"])
            first = start.step
            log.info("resumed from %s at step %d", start.folder, first)
            for line in checkpoint.differences(start.state.get("config", {}), self.plain):
                log.warning("resumed with another setting: %s", line)
        aside = checkpoint.set_aside(self.folders.checkpoints, start)
        if aside is not None:
            log.warning("checkpoints that an earlier run left in %s were moved to %s", self.folders.checkpoints, aside)
        self.tracking.resume(first)
        await self._sync(first)
        await self.residence.clear()
        return first

    async def _train(self, first: int) -> Outcome:
        last: dict[str, float] = {}
        times: dict[str, float] = {}
        for step in range(first, self.config.max_steps):
            began = time.perf_counter()
            last = await self._evaluate(step, times) if self._evaluates(step) else {}
            last |= await self._step(step, times)
            times["step"] = time.perf_counter() - began
            self._log(step, last, times)
            done, times = step + 1, {}  # a checkpoint follows what it counts as logged; the time of saving is told with the next step
            if done < self.config.max_steps and self.config.save_steps and done % self.config.save_steps == 0:
                await self._save(done, times)
            if self._stop.is_set() and done < self.config.max_steps:
                await self._interrupted(done)
        return await self._finish(last, times, ran=first < self.config.max_steps)

    async def _finish(self, last: dict[str, float], times: dict[str, float], ran: bool) -> Outcome:
        """The final checkpoint, evaluation and report. A run resumed after its last step reports again and saves nothing."""
        step = self.config.max_steps
        if ran:
            await self._save(step, times)
        if self.evaluator is not None and self.config.eval_at_end:
            final = await self._evaluate(step, times)
            self._log(step, final, times)
            last = last | final
        text = report.write(self.folders.output, self.config, self._history, self.saved)
        self.tracking.artifact(step, "report", self.folders.output / "report.md")
        return Outcome(self.saved, text, last)

    async def _step(self, step: int, times: dict[str, float]) -> dict[str, float]:
        """One pipeline step: everything between two versions of the policy."""
        played = await self._rollout(step, times)
        batch = build_batch(self._clipped(played.trajectories), played.samples)
        out = metrics.batch_metrics(batch) | metrics.environment_metrics(played.trajectories) | _prefixed(played.counts)
        if not len(batch.samples):
            log.warning(
                "step %d: no token was sampled in %d episodes (prompts over sequence_length?), nothing is learned", step, len(batch.trajectories)
            )
        self.tracking.trajectories(step, "train", played.trajectories)
        if self.config.rollout_dump_dir:
            frames.dump(Path(self.config.rollout_dump_dir), step, played.trajectories)
        batch = advantages.filter_groups(batch, self.filters)
        if self.filters:
            out["rollout/filtered"] = float((~trains(batch)).sum())
        planned = plan_step(batch, self.adjust, self.config.seed, step)
        await self.residence.sleep()
        async with self.residence.using("actor_train"):
            out |= await self._learn(batch, planned, step, times)
            with _timed(times, "sync"):
                await self.residence.wake()
                await self._sync(step + 1)
        out["tps/actor_train"] = out.get("tokens/total", 0.0) * self.config.ppo_epochs / max(times["actor_train"], 1e-9)
        out["tps/rollout"] = out.get("tokens/sampled", 0.0) / max(times["rollout"], 1e-9)
        return out

    async def _learn(self, batch: Batch, planned: list[Any], step: int, times: dict[str, float]) -> dict[str, float]:
        """From a batch of trajectories to the last of its updates."""
        batch = await self._log_probs(batch, len(planned), step, times)
        with _timed(times, "advantage"):
            if self._kl_coef > 0:
                batch = advantages.add_kl_penalty(batch, self.config, self._kl_coef)
            batch = advantages.with_advantages(batch, self.estimator, self.config)
        out = metrics.advantage_metrics(batch, getattr(self.estimator, "normalization", None)) | self._adapt_kl(batch)
        if self.critic is not None:
            with _timed(times, "critic_train"):
                async with self.residence.using("critic"):
                    out |= await self._update_critic(batch, step)
        if self.old_logprobs.recomputed:
            out |= correction.compared(batch)
        batch, found = correction.corrected(batch, self.config)  # after the critic, whose loss it does not touch
        out |= found
        with _timed(times, "actor_train"):
            results, rate = await self._update(batch, planned, step)
        out |= metrics.update_metrics(results) | rate
        out["rollout/rows_added"] = float(sum(len(u.rows) for u in planned) - len(batch.samples))
        return out

    def _trained(self) -> list[tuple[str, Any]]:
        """The roles with state of their own, by name."""
        return [("actor_train", self.actor), *([("critic", self.critic)] if self.critic is not None else [])]

    async def _rollout(self, step: int, times: dict[str, float]) -> RolloutResult:
        with _timed(times, "rollout"):
            played: RolloutResult = await self._unless_stopped(mock.next_batch(self.config, self.scheduler, step), step)
        self.tracking.failures(f"step {step}", played.failures)
        return played

    async def _unless_stopped(self, work: Any, step: int) -> Any:
        """Await `work`, which changes no weight; a stop asked for meanwhile cancels it, saves and ends the run, and so does the end of a role."""
        watches = [getattr(role, "watch", None) for role in (self.actor, self.reference, self.critic)]
        done, value = await guards.unless(work, self._stop, [watch() for watch in watches if watch is not None])
        if not done:
            await self._interrupted(step)
        return value

    def _clipped(self, played: list[Trajectory]) -> list[Trajectory]:
        bound = self.config.reward_clip
        if bound is None:
            return played
        return [evolve(t, turns=tuple(evolve(turn, reward=float(np.clip(turn.reward, -bound, bound))) for turn in t.turns)) for t in played]

    async def _log_probs(self, batch: Batch, planned: int, step: int, times: dict[str, float]) -> Batch:
        """Old log-probs where they are needed, the reference's, and the critic's values."""
        with _timed(times, "old_logprobs"):
            batch = await self.old_logprobs.add(batch, self.actor, updates=planned * self.config.ppo_epochs, version=step)
        if self.reference is not None:
            with _timed(times, "reference"):
                async with self.residence.using("reference"):
                    values = await self.reference.call("logprobs", training_rows(batch))
            batch = batch.with_tokens(ref_log_probs=_spread(batch, values))
        if self.critic is not None:
            with _timed(times, "values"):
                async with self.residence.using("critic"):
                    values = await self.critic.call("values", training_rows(batch))
            batch = batch.with_tokens(values=_spread(batch, values))
        return batch

    async def _update(self, batch: Batch, planned: list[Any], step: int) -> tuple[list[UpdateResult], dict[str, float]]:
        results, rates = [], []
        for update in updates(batch, planned, self.config, self.config.actor_train, step, self.config.kl_loss_coef):
            results.append(await self.actor.call("update", update))
            rates.append(update.lr)
        self._history.trained(step, rates)
        return results, {"policy/learning_rate": rates[-1]} if rates else {}

    async def _update_critic(self, batch: Batch, step: int) -> dict[str, float]:
        """The critic's updates: its own U, learning rate and, for its loss, token-mean."""
        assert self.critic is not None and self.critic_adjust is not None
        config = evolve(self.config, loss_agg_mode="token-mean")
        planned = plan_step(batch, self.critic_adjust, config.seed, step)
        role = assembly.role_of(config, "critic")
        results, rate = [], 0.0
        for update in updates(batch, planned, config, role, step, 0.0):
            results.append(await self.critic.call("update", update))
            rate = update.lr
        return metrics.update_metrics(results, "critic") | ({"critic/learning_rate": rate} if results else {})

    def _adapt_kl(self, batch: Batch) -> dict[str, float]:
        """The adaptive coefficient moves once a step (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""
        config = self.config
        if "ref_log_probs" not in batch.tokens or not config.init_kl_coef:
            return {}
        kl, count = advantages.mean_kl(batch, config.kl_penalty)
        used = self._kl_coef
        if config.target_kl is not None and count:
            self._kl_coef = advantages.adapted(used, kl, config.target_kl, count, config.kl_horizon)
        return {"critic/kl": kl, "critic/kl_coef": used}

    async def _sync(self, version: int) -> None:
        """Weights of `version` from the trainer to the backend."""
        config = self.config
        await transport.update(
            self.actor, self.backend, self.transport, version, pausing=config.runtime_timeout, passing=config.actor_infer.weight_sync_timeout
        )

    def _evaluates(self, step: int) -> bool:
        return self.evaluator is not None and step % (self.config.eval_steps or 1) == 0

    async def _evaluate(self, step: int, times: dict[str, float]) -> dict[str, float]:
        """Play the fixed evaluation tasks; the baselines play them once, before the first step."""
        assert self.evaluator is not None and self.config.val_env_manager is not None
        with _timed(times, "eval"):
            render = self.config.render_episodes if self.folders.frames else 0
            played = await self._unless_stopped(self.evaluator.evaluate(render=render), step)
        self.tracking.failures(f"evaluation at step {step}", played.failures)
        out = metrics.evaluation_metrics(played.trajectories, assembly.planned_episodes(self.config.val_env_manager))
        self._history.evaluations[step] = out
        self.tracking.trajectories(step, "val", played.trajectories)
        if self.folders.frames:
            for name, path in frames.write(self.folders.frames / f"step-{step:06d}", played.frames):
                self.tracking.artifact(step, name, path)
        for choice in self.config.baselines:
            if choice.name not in self._history.baselines:
                self._history.baselines[choice.name] = await self._unless_stopped(self._baseline(choice), step)
        return out

    async def _baseline(self, choice: Any) -> dict[str, float]:
        backend = assembly.player(choice, self.config.val_seed)
        scheduler = assembly.scheduler(self.config, self.base, backend, None, evaluation=True)
        try:
            played = await scheduler.evaluate()
        finally:
            await scheduler.close()
            await backend.close()
        assert self.config.val_env_manager is not None
        return metrics.evaluation_metrics(played.trajectories, assembly.planned_episodes(self.config.val_env_manager))

    async def _save(self, done: int, times: dict[str, float]) -> None:
        state = {"kl_coef": self._kl_coef, "scheduler": self.scheduler.state(), "history": self._history.to_plain(), "config": self.plain}

        async def write(folder: Path) -> None:
            for name, role in self._trained():
                async with self.residence.using(name):
                    await role.call("save", folder / name)
                    if role is self.actor:
                        await role.call("export", folder / "model")

        with _timed(times, "save"):
            await self.residence.sleep()
            self.saved, self._saved_step = await checkpoint.save(self.folders.checkpoints, done, state, write), done
            checkpoint.prune(self.folders.checkpoints, self.config.max_ckpt_to_keep)
            await self.residence.wake()
        log.info("saved %s", self.saved)

    async def _interrupted(self, done: int) -> None:
        """Save what is finished and end the run."""
        if self._saved_step != done:
            await self._save(done, {})
        raise Interrupted(f"stopped after {done} of {self.config.max_steps} steps; saved {self.saved}")

    def _log(self, step: int, values: dict[str, float], times: dict[str, float]) -> None:
        values |= {f"time/{name}": seconds for name, seconds in times.items()} | metrics.system_metrics()
        self._history.note(values)
        if step % self.config.logging_steps == 0 or step >= self.config.max_steps - 1 or self._evaluates(step):
            self.tracking.scalars(step, values)

    async def _close(self) -> None:
        for name in ("scheduler", "evaluator"):
            if getattr(self, name, None) is not None:
                await getattr(self, name).close()
        await self.runtime.close()
        self.tracking.close()


def _prefixed(counts: Mapping[str, float]) -> dict[str, float]:
    return {f"rollout/{name}": float(value) for name, value in counts.items()}


def _spread(batch: Batch, values: np.ndarray) -> np.ndarray:
    """Values over the sampled tokens in row order as a token column, 0 elsewhere."""
    out = np.zeros(len(batch.tokens), np.float32)
    out[batch.tokens["response_mask"]] = values
    return out


@contextlib.contextmanager
def _timed(times: dict[str, float], phase: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        times[phase] = times.get(phase, 0.0) + time.perf_counter() - began
