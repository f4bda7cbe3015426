"""Rollout: seeds, environments behind timeouts, and the scheduler that plays groups of episodes."""

from turnwise.rollout.plan import RolloutResult, RolloutSettings, TagPlan
from turnwise.rollout.scheduler import Scheduler
from turnwise.rollout.stage import EpisodeSpec, LocalStage, Played, Stage, WorkerLost

__all__ = ["EpisodeSpec", "LocalStage", "Played", "RolloutResult", "RolloutSettings", "Scheduler", "Stage", "TagPlan", "WorkerLost"]
