"""The `trajectory` manager: one conversation that only grows, tokens in and tokens out, one training sample per
episode."""

from __future__ import annotations

from turnwise.contracts.env_manager import Episode, ManagerContext, Sampler
from turnwise.data.trajectory import Sample, Trajectory
from turnwise_managers.base import Growing, Rules, one_row, play
from turnwise_managers.config import TrajectoryConfig


class TrajectoryManager:
    """The prompt of a turn is the previous prompt, the tokens that were sampled, and the new observation as their
    continuation."""

    def __init__(self, config: TrajectoryConfig, context: ManagerContext) -> None:
        self.rules = Rules.of(config)
        self.prompts = Growing(config.history, config.detect_drift)

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        """Play the episode to its end. Raises EngineError, EnvironmentFailure, and ConfigError for what `history`
        cannot show."""
        return await play(episode, sampler, self.rules, self.prompts)

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        """The whole episode as one row; none if nothing was sampled."""
        return one_row(trajectory)
