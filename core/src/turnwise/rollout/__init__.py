"""Rollout: seeds, environments behind timeouts, and the scheduler that plays groups of episodes."""

from turnwise.rollout.plan import RolloutResult, RolloutSettings, TagPlan
from turnwise.rollout.scheduler import Scheduler

__all__ = ["RolloutResult", "RolloutSettings", "Scheduler", "TagPlan"]
