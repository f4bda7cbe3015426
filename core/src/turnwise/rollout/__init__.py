"""Rollout: seeds, environments behind timeouts, and the scheduler that plays groups of episodes."""

from turnwise.rollout.scheduler import Scheduler
from turnwise.rollout.worker import LocalExecutor

__all__ = ["LocalExecutor", "Scheduler"]
