"""Self-play: two lines of one model take turns in one game, and each is a trajectory of its own role. With it, a game
for two."""

from __future__ import annotations

import random
from typing import Any

from attrs import frozen

import turnwise
from turnwise.contracts.env_manager import Episode, ManagerCapabilities, ManagerContext, Sampler
from turnwise.data.trajectory import Sample, Trajectory
from turnwise_managers.base import Anew, Line, ManagerConfig, Rules, World, row_per_call


@frozen(kw_only=True)
class DuelConfig(ManagerConfig):
    """The options of every manager, and `opponent`: the name of a sampler that plays second (null: the model
    itself)."""

    opponent: str | None = None


class Duel:
    """Any environment whose reward is the mover's: what one gains, the other loses. Who plays second is compared with
    who plays second."""

    capabilities = ManagerCapabilities(row_per_turn=True, roles=("first", "second"))

    def __init__(self, config: DuelConfig, context: ManagerContext) -> None:
        self.rules, self.opponent = Rules.of(config, history_length=0), config.opponent

    async def run(self, episode: Episode, sampler: Sampler) -> list[Trajectory]:
        """Play the game to its end."""
        world = await World(episode).begin()
        second = sampler if self.opponent is None else episode.samplers[self.opponent]
        lines = [
            Line(world, who, self.rules, Anew(), role)
            for who, role in zip((sampler, second), self.capabilities.roles, strict=True)
        ]
        while world.going:
            mover, other = lines[world.steps % 2], lines[1 - world.steps % 2]
            mover.show()
            if not await mover.ask():
                break
            other.credit(-await mover.act())
        mine = (
            lines[:1] if self.opponent is not None else lines if lines[1].turns else lines[:1]
        )  # another's moves are not trained
        return [line.trajectory(success=line.score > 0) for line in mine]

    def samples(self, trajectory: Trajectory) -> list[Sample]:
        """One row per move."""
        return row_per_call(trajectory)


class Nim:
    """Take one, two or three stones from a heap; who takes the last one wins, and who does anything else has lost."""

    def __init__(self, least: int = 4, most: int = 9) -> None:
        self._least, self._most, self._heap = least, most, least

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """A heap of the seed's size."""
        self._heap = random.Random(seed).randint(self._least, self._most)
        return self.render(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The mover's reward: 1 for the last stone, −1 for an invalid move, else 0."""
        if action not in self._info()["actions"]:
            return self.render(), -1.0, True, False, self._info()
        self._heap -= int(action)
        return self.render(), float(self._heap == 0), self._heap == 0, False, self._info()

    def render(self) -> str:
        """What the players see."""
        return f"Stones: {self._heap}"

    def _info(self) -> dict[str, Any]:
        return {"state_key": self._heap, "actions": tuple(str(n) for n in (1, 2, 3) if n <= self._heap)}


@turnwise.hookimpl
def env_managers() -> list[turnwise.Implementation]:
    """The manager of this file."""
    return [
        turnwise.Implementation(
            "duel", Duel, config=DuelConfig, summary="two lines of one model, or of two, take turns in one game"
        )
    ]


@turnwise.hookimpl
def environments() -> list[turnwise.Implementation]:
    """The game of this file."""
    return [turnwise.Implementation("nim", Nim, summary="take one to three stones; the last one wins")]
