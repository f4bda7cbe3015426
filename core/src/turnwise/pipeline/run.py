"""One training run from its configuration to its outcome: the roles are placed, the rooms opened, a checkpoint taken
up, the loop run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.config.schema import RunConfig
from turnwise.contracts.estimator import AdvantageEstimator, EstimatorCapabilities, EstimatorContext
from turnwise.contracts.runtime import Runtime
from turnwise.declared import declared
from turnwise.pipeline import guards, roles, rollouts
from turnwise.pipeline.clock import Clock
from turnwise.pipeline.evaluation import Evaluation
from turnwise.pipeline.learner import Learner
from turnwise.pipeline.loop import Loop, Outcome
from turnwise.pipeline.progress import Progress
from turnwise.pipeline.saving import Saving
from turnwise.pipeline.tracking import Tracking
from turnwise.pipeline.weights import WeightSync
from turnwise.planning import assembly, builders, resume
from turnwise.rollout import Scheduler, mock


class Pipeline:
    """One training run. `base` is the folder of the YAML, `plain` the resolved configuration for loggers and
    checkpoints."""

    # Any: the configuration as it was written
    def __init__(self, config: RunConfig, base: Path, plain: Mapping[str, Any]) -> None:
        self.config = assembly.with_seed_files(config, base)
        self.base = base
        self.plain = plain
        self.folders = assembly.Folders.of(config)
        self.progress = Progress()
        self._stop = asyncio.Event()

    async def run(self) -> Outcome:
        """Train to max_steps. Raises TurnwiseError (one line; `self.progress.saved` is the newest checkpoint) or
        Interrupted."""
        # First of all: a checkpoint that cannot be read leaves nothing behind.
        start = resume.to_resume(self.config.resume_from_checkpoint, self.folders.checkpoints)
        if start is not None:
            self.progress.take_up(start, self.config.max_steps)
        self.folders.output.mkdir(parents=True, exist_ok=True)
        # Closed in reverse, whatever one of them raises.
        async with contextlib.AsyncExitStack() as opened:
            # Closed last: nobody else writes here before all roles have ended.
            opened.enter_context(guards.alone_in(self.folders.output))
            runtime = assembly.runtime(self.config, self.base)
            tracking = Tracking(assembly.loggers(self.config, self.plain))
            opened.callback(tracking.close)
            opened.push_async_callback(runtime.close)
            with guards.stop_on_signals(self._stop):
                loop = await self._open(runtime, tracking, opened, start)
                self.progress.first = await self._begin(loop, start)
                return await loop.run(self.progress.first)

    async def _open(
        self, runtime: Runtime, tracking: Tracking, opened: contextlib.AsyncExitStack, start: resume.Checkpoint | None
    ) -> Loop:
        """Place the roles and build every room around them."""
        config, clock = self.config, Clock(asyncio.get_running_loop().time)
        estimator: AdvantageEstimator = builders.build(
            "advantage_estimator", config.adv_estimator, EstimatorContext(seed=config.seed)
        )
        known = declared(EstimatorCapabilities, config.adv_estimator.name, config.adv_estimator.config)
        # A recipe would number the tokens anew, and the weights know the old numbers.
        tokenizer = None if start is None else start.folder / "model"
        placed = await roles.place(
            config,
            self.base,
            runtime,
            critic="values" in known.needs,
            tokenizer=tokenizer,
            stopping=self._stop.is_set,
        )
        guard = guards.Guard(self._stop, placed.watched)
        # The adaptive coefficient goes on from where it was.
        kl_coef = config.init_kl_coef if start is None else start.state["kl_coef"]
        learner = Learner(config, placed, estimator, clock, kl_coef, self.progress.reporting)
        source = self._source(placed, runtime)
        opened.push_async_callback(source.close)
        evaluator = (
            self._scheduler(placed, runtime, evaluation=True)
            if config.val_env_manager is not None and config.eval_steps
            else None
        )
        if evaluator is not None:
            opened.push_async_callback(evaluator.close)
        return Loop(
            config=config,
            rollouts=source,
            learner=learner,
            weights=WeightSync(config, placed),
            evaluation=Evaluation(config, self.base, evaluator, tracking, self.progress, guard, clock),
            saving=Saving(config, self.plain, placed, source, learner, self.progress, clock),
            colocation=placed.colocation,
            tracking=tracking,
            guard=guard,
            clock=clock,
            progress=self.progress,
        )

    def _source(self, placed: roles.Roles, runtime: Runtime) -> rollouts.RolloutSource:
        """Where the training episodes come from (`rollout_mock`)."""
        if mock.mocks(self.config):
            return rollouts.Dumped(self.config)
        scheduler = self._scheduler(placed, runtime, evaluation=False)
        return rollouts.Dumping(scheduler, self.config) if mock.dumps(self.config) else rollouts.Live(scheduler)

    def _scheduler(self, placed: roles.Roles, runtime: Runtime, *, evaluation: bool) -> Scheduler:
        return assembly.scheduler(
            self.config, self.base, placed.backend, placed.chat, evaluation=evaluation, runtime=runtime
        )

    async def _begin(self, loop: Loop, start: resume.Checkpoint | None) -> int:
        """Take up `start`, and publish the first weights; the first step to train."""
        first = await loop.saving.restore(start)
        loop.tracking.resume(first)
        # Before anything plays: what a trainer took up is not what the engine was started with.
        await loop.weights.publish(first)
        return first
