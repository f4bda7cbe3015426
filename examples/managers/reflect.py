"""A manager that reflects: a draft, a question about it, and the answer that is played. Both calls are trained by the
step's reward."""

from __future__ import annotations

from attrs import frozen

import turnwise
from turnwise.contracts.env_manager import Episode, ManagerCapabilities, ManagerContext, Sampler
from turnwise.data.trajectory import Sample, Trajectory
from turnwise_managers.base import Growing, Line, ManagerConfig, Rules, World, one_row


@frozen(kw_only=True)
class ReflectConfig(ManagerConfig):
    """The options of every manager, and `question`: what the model is asked about its draft."""

    question: str = "Is that the best action? Answer with the action alone."


class Reflect:
    """Two calls to a step of the environment, in one conversation that only grows."""

    capabilities = ManagerCapabilities(calls_per_step=2)

    def __init__(self, config: ReflectConfig, context: ManagerContext) -> None:
        self.rules, self.question = Rules.of(config), config.question

    async def run(self, episode: Episode, sampler: Sampler) -> Trajectory:
        """Play the episode to its end."""
        world = await World(episode).begin()
        line = Line(world, sampler, self.rules, Growing())
        while world.going:
            line.show()
            if not await line.ask():
                break
            line.show(self.question)
            if not await line.ask():
                break
            await line.act()
        return line.trajectory()

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        """The whole conversation as one row."""
        return one_row(trajectory)


@turnwise.hookimpl
def env_managers() -> list[turnwise.Implementation]:
    """The manager of this file."""
    return [
        turnwise.Implementation(
            "reflect", Reflect, config=ReflectConfig, summary="a draft, a question, the answer that is played"
        )
    ]
