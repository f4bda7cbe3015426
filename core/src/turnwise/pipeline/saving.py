"""What a checkpoint of a run holds, when one is written, and how a run takes one up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.config.schema import RunConfig
from turnwise.errors import one_line
from turnwise.pipeline import checkpoint, queued
from turnwise.pipeline.clock import Clock
from turnwise.pipeline.learner import Learner
from turnwise.pipeline.progress import Progress
from turnwise.pipeline.roles import Roles
from turnwise.pipeline.rollouts import RolloutSource
from turnwise.planning import assembly, resume

log = logging.getLogger("turnwise")

SLEEP_SECONDS = 60.0
"""How long the backend of a failed run may take to give its devices to the trainer that saves."""


class Saving:
    """Writes and reads the run's checkpoints. `plain`: the resolved configuration, which they hold, so that a resumed
    run can be compared."""

    def __init__(
        self,
        config: RunConfig,
        plain: Mapping[str, Any],  # Any: a configuration as YAML has it
        roles: Roles,
        rollouts: RolloutSource,
        learner: Learner,
        progress: Progress,
        clock: Clock,
    ) -> None:
        self._config, self._plain, self._root = config, plain, assembly.Folders.of(config).checkpoints
        self._roles, self._rollouts, self._learner = roles, rollouts, learner
        self._progress, self._clock = progress, clock
        self._tried = -1

    def due(self, done: int) -> bool:
        """Whether a checkpoint follows after `done` steps; the one after the last step is not asked for here."""
        return done < self._config.max_steps and bool(self._config.save_steps) and done % self._config.save_steps == 0

    async def restore(self, start: resume.Checkpoint | None) -> int:
        """Load what `start` holds and return the first step to train; checkpoints of other runs are moved out of the
        way."""
        first = 0
        if start is not None:
            for name, role in self._roles.with_state.items():
                await self._roles.colocation.bring(name)
                await role.load(start.folder / name)
            queue = start.state["scheduler"]
            if isinstance(queue, dict) and queue.get("queue") == queued.FILE:
                queue = await asyncio.to_thread(queued.read, start.folder)
            self._rollouts.restore(queue)
            first = start.step
            log.info("resumed from %s at step %d", start.folder, first)
            before = start.state.get("config", {})
            for line in [
                *resume.differences(before, self._plain),
                *resume.rate_jumps(before, self._config, first),
                *resume.differences_ahead(before, self._plain, bool(queue["queue"])),
            ]:
                log.warning("resumed with another setting: %s", line)
        aside = checkpoint.set_aside(self._root, start)
        if aside is not None:
            log.warning("checkpoints that an earlier run left in %s were moved to %s", self._root, aside)
        return first

    async def save(self, done: int) -> None:
        """Write the checkpoint after `done` steps, unless it is there. Raises CheckpointError."""
        if self._progress.saved_step == done:
            return
        # Noted before the attempt: where it fails, `rescue` does not try the same again.
        self._tried = done
        with self._clock.phase("save"):
            await self._rollouts.hold()  # no response is cut through
            played = self._rollouts.state(done)
            # They go on while the roles write: what they do from here belongs to the next checkpoint.
            await self._rollouts.release()
            await self._roles.colocation.sleep()
            await self._checkpoint(done, played)
            await self._roles.colocation.sampling()

    async def rescue(self, done: int, error: Exception) -> None:
        """Save for a run that ends with `error`, unless that was tried. A failure to do so is a warning: the error
        stays the one that counts."""
        if done in (self._progress.saved_step, self._tried):
            return
        log.warning("the run fails (%s); first, the weights after %d steps are saved", type(error).__name__, done)
        try:
            with contextlib.suppress(
                Exception
            ):  # a backend that is gone, or hangs, is often what went wrong: it needs its devices no more
                async with asyncio.timeout(SLEEP_SECONDS):
                    await self._roles.colocation.sleep()
            # Without `hold`: the backend may never answer, and records are of whole turns at any moment.
            await self._checkpoint(done, self._rollouts.state(done))
        except Exception as failure:
            log.warning("the weights after %d steps could not be saved: %s", done, one_line(failure))

    async def _checkpoint(self, done: int, played: dict[str, Any]) -> None:  # Any: as RolloutSource.state
        state = {
            "kl_coef": self._learner.kl_coef,
            "scheduler": {"queue": queued.FILE} if played["queue"] else played,
            "history": self._progress.history.to_plain(),
            "reporting": self._progress.reporting.to_plain(),
            "config": self._plain,
        }
        saved = await checkpoint.save(self._root, done, state, partial(self._write, played))
        self._progress.saved, self._progress.saved_step = saved, done
        # Only when the new one is whole: whatever goes wrong, there is an older one.
        checkpoint.prune(self._root, self._config.max_ckpt_to_keep)
        log.info("saved %s", saved)

    async def _write(self, played: dict[str, Any], folder: Path) -> None:  # Any: as RolloutSource.state
        if played["queue"]:
            await asyncio.to_thread(queued.write, folder, played)
        for name, role in self._roles.with_state.items():
            await self._roles.colocation.bring(name)
            await role.save(folder / name)
            # The actor alone is exported: this folder is what evaluates, and what other tools load.
            if role is self._roles.actor:
                await role.export(folder / "model")
