"""The `stepwise` manager: each turn's prompt is rendered anew from the last turns, one training sample per turn or
merged run of turns."""

from __future__ import annotations

from turnwise.contracts.env_manager import Episode, ManagerContext, Sampler
from turnwise.data.trajectory import Sample, Trajectory
from turnwise_managers.base import Anew, Rules, merged, play, row_per_call
from turnwise_managers.config import StepwiseConfig


class StepwiseManager:
    """Earlier turns stand before the observation as messages, or, where the template has `{history}`, inside the one
    user message."""

    def __init__(self, config: StepwiseConfig, context: ManagerContext) -> None:
        self.rules = Rules.of(config, config.history_length)
        self.merge_steps = config.merge_steps

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        """Play the episode to its end. A prompt over `max_prompt_length` is not sent: the trajectory ends with the
        turns it has.

        Raises EngineError and EnvironmentFailure."""
        return await play(episode, sampler, self.rules, Anew())

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        """One row per turn in which a token was sampled; with `merge_steps`, turns whose prompts continue each other
        share one."""
        return merged(trajectory.turns) if self.merge_steps else row_per_call(trajectory)
