"""The loop, which knows the order of the work and nothing else: evaluate, next batch, learn, publish, save."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from attrs import define, frozen

from turnwise.config.schema import RunConfig
from turnwise.contracts.rollout import RolloutResult
from turnwise.errors import Interrupted
from turnwise.pipeline import frames, metrics, report, staleness
from turnwise.pipeline.clock import Clock
from turnwise.pipeline.colocation import Colocation
from turnwise.pipeline.evaluation import Evaluation
from turnwise.pipeline.guards import Guard, Stopped
from turnwise.pipeline.learner import Learner
from turnwise.pipeline.progress import Progress
from turnwise.pipeline.rollouts import RolloutSource
from turnwise.pipeline.saving import Saving
from turnwise.pipeline.tracking import Tracking
from turnwise.pipeline.weights import WeightSync


@frozen
class Outcome:
    """How a run ended: its last checkpoint, the report, and the last metrics."""

    checkpoint: Path | None
    report: str
    metrics: Mapping[str, float]


@define(eq=False)
class Loop:
    """One training run whose roles are placed. Version v of the weights is what v steps have made of them: step v is
    played with it."""

    config: RunConfig
    rollouts: RolloutSource
    learner: Learner
    weights: WeightSync
    evaluation: Evaluation
    saving: Saving
    colocation: Colocation
    tracking: Tracking
    guard: Guard
    clock: Clock
    progress: Progress
    done: int = 0
    """How many steps have made the weights that the trainer holds."""
    logged: int = 0
    """How many of them the loggers got."""

    async def run(self, first: int) -> Outcome:
        """Train the steps from `first` to max_steps. Raises Interrupted after a stop, or what went wrong; what is done
        is saved in both cases."""
        self.done = self.logged = first
        self.clock.take()  # what was before is no step's
        values = dict[str, float]()
        try:
            for step in range(first, self.config.max_steps):
                with self.clock.phase("step"):
                    values = await self._evaluate(step) if self.evaluation.due(step) else {}
                    played = await self._next_batch(step)
                    await self._train(step, played, values)
                self._log(step, values)
                # A checkpoint follows what it counts as logged; the time of saving is logged with the next step.
                if self.saving.due(self.done):
                    await self.saving.save(self.done)
                if self.guard.stopping and self.done < self.config.max_steps:
                    raise Stopped
            return await self._finish(values, ran=first < self.config.max_steps)
        except Stopped:
            await self.saving.save(self.done)
            raise Interrupted(
                f"stopped after {self.done} of {self.config.max_steps} steps; saved {self.progress.saved}"
            ) from None
        except Exception as error:
            # An outage must not lose what Ctrl-C would have kept. In the middle of a step's updates the weights are of
            # no version.
            if self.done > first and not self.learner.changing:
                if self.logged < self.done:
                    self._log(self.done - 1, values)
                await self.saving.rescue(self.done, error)
            raise

    async def _evaluate(self, step: int) -> dict[str, float]:
        await self.guard.unless_gone(self.rollouts.hold())
        values = await self.evaluation.play(step)
        await self.rollouts.release()
        return values

    async def _next_batch(self, step: int) -> RolloutResult:
        """The episodes of the step, as they were played."""
        with self.clock.phase("rollout"):
            # A stop does not wait for the batch, which may take hours: no weight is changing, and whatever is given up
            # is played again by the resumed run with these very weights.
            played = await self.guard.unless_stopped(self.rollouts.next(step, version=step))
        self.tracking.failures(f"step {step}", played.failures)
        self.tracking.trajectories(step, "train", played.trajectories)
        if self.config.rollout_dump_dir:
            await asyncio.to_thread(frames.dump, Path(self.config.rollout_dump_dir), step, played.trajectories)
        return played

    async def _train(self, step: int, played: RolloutResult, values: dict[str, float]) -> None:
        """Everything between two versions of the policy, the new one published; `values` gets its metrics."""
        ahead = self.rollouts.gauges()
        lesson = await self.learner.prepare(step, played)
        await self.colocation.sleep()
        learnt = await self.learner.learn(lesson)
        # From here on the weights are the next version's, published or not: `rescue` saves them under this number.
        self.done = step + 1
        values |= lesson.metrics | learnt.metrics
        self.progress.history.trained(step, learnt.rates)
        with self.clock.phase("rollout"):  # the trainer waits for the sampler, as in `next`
            # A stop waits here: the weights have moved on, and what is open could not be played with its own again.
            await self.guard.unless_gone(self.rollouts.settled(step + 1))
        with self.clock.phase("sync"):
            await self.weights.publish(step + 1)
        await self.rollouts.release()
        worked = self.rollouts.worked()
        values |= metrics.throughput(values, self.clock, self.config.ppo_epochs, worked)
        if ahead:
            values |= staleness.occupation(ahead, self.clock, worked)

    async def _finish(self, last: dict[str, float], ran: bool) -> Outcome:
        """The final checkpoint, evaluation and report. A run resumed after its last step reports again and saves
        nothing."""
        step, output = self.config.max_steps, Path(self.config.output_dir)
        if ran:
            await self.saving.save(step)
        if self.evaluation.due_at_end:
            final = await self._evaluate(step)
            self._log(step, final)
            last = last | final
        text = report.write(output, self.config, self.progress.history, self.progress.saved)
        self.tracking.artifact(step, "report", output / "report.md")
        return Outcome(self.progress.saved, text, last)

    def _log(self, step: int, values: dict[str, float]) -> None:
        """Close the step's metrics: `values` gets what the clock and the system add, and the loggers get it at
        `logging_steps`."""
        values |= {f"time/{name}": seconds for name, seconds in self.clock.take().items()} | metrics.system_metrics()
        # The last steps have none after them, and the sampler nothing to do.
        ahead = step + self.config.async_generation_ratio < self.config.max_steps
        self.progress.history.note(values, ahead=ahead)
        self.logged = step + 1
        if step % self.config.logging_steps == 0 or step >= self.config.max_steps - 1 or self.evaluation.due(step):
            self.tracking.scalars(step, values)
