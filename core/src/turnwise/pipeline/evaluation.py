"""Evaluation: the same tasks every time, played by the model, once by the baselines; metrics, trajectories and pictures
of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from turnwise.config.schema import Choice, RunConfig
from turnwise.data.trajectory import Trajectory
from turnwise.pipeline import frames, metrics, staleness
from turnwise.pipeline.clock import Clock
from turnwise.pipeline.guards import Guard
from turnwise.pipeline.progress import Progress
from turnwise.pipeline.tracking import Tracking
from turnwise.planning import assembly, builders
from turnwise.rollout import Scheduler


class Evaluation:
    """`scheduler`: plays the fixed tasks with the sampling role; None: this run evaluates nothing."""

    def __init__(
        self,
        config: RunConfig,
        base: Path,
        scheduler: Scheduler | None,
        tracking: Tracking,
        progress: Progress,
        guard: Guard,
        clock: Clock,
    ) -> None:
        self._config, self._base, self._scheduler = config, base, scheduler
        self._tracking, self._history, self._reporting = tracking, progress.history, progress.reporting
        self._guard, self._clock = guard, clock
        self._frames = assembly.Folders.of(config).frames

    def due(self, step: int) -> bool:
        """Whether the model is evaluated before it is trained in this step."""
        # No scheduler is built where eval_steps is 0 or null.
        return self._scheduler is not None and step % (self._config.eval_steps or 1) == 0

    @property
    def due_at_end(self) -> bool:
        """Whether it is evaluated after the last step."""
        return self._scheduler is not None and self._config.eval_at_end

    async def play(self, step: int) -> dict[str, float]:
        """Play the tasks; the baselines play them once in a run. Raises Stopped."""
        assert self._scheduler is not None
        with self._clock.phase("eval"):
            render = self._config.render_episodes if self._frames else 0
            played = await self._guard.unless_stopped(self._scheduler.evaluate(render=render))
        self._tracking.failures(f"evaluation at step {step}", played.failures)
        out = self._metrics(played.trajectories)
        if self._config.async_generation_ratio:
            out |= staleness.of_evaluation(played.trajectories)
        self._history.evaluations[step] = out
        self._tracking.trajectories(step, "val", played.trajectories)
        if self._frames:
            # On another thread: a GIF takes longer than a request.
            for name, path in await asyncio.to_thread(
                list, frames.write(self._frames / f"step-{step:06d}", played.frames)
            ):
                self._tracking.artifact(step, name, path)
        for choice in self._config.baselines:
            # A player does not learn: once is enough, and the history carries it through a resume.
            if choice.name not in self._history.baselines:
                self._history.baselines[choice.name] = await self._guard.unless_stopped(self._baseline(choice))
        return out

    async def _baseline(self, choice: Choice) -> dict[str, float]:
        """What a player that needs no model makes of the same tasks."""
        backend = builders.player(choice, self._config.val_seed)
        scheduler = assembly.scheduler(self._config, self._base, backend, None, evaluation=True)
        try:
            played = await scheduler.evaluate()
        finally:
            await scheduler.close()
            await backend.close()
        return self._metrics(played.trajectories)

    def _metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        assert self._config.val_env_manager is not None
        return metrics.evaluation_metrics(
            trajectories, assembly.planned_episodes(self._config.val_env_manager), self._reporting
        )
