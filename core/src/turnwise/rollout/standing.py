"""What every episode that is played waits for, and whether anything moves at all. Public: a runtime's executor keeps
one, too."""

from __future__ import annotations

import asyncio

from attrs import define, field

from turnwise.contracts.rollout import EpisodeSpec


@define(eq=False)
class Standing:
    """Of the episodes in one process. `moved` counts every call that one of them begins or ends."""

    moved: int = 0
    # By the spec's identity: two attempts at an episode are two.
    _at: dict[EpisodeSpec, tuple[str, float]] = field(factory=dict)

    def at(self, spec: EpisodeSpec, what: str) -> None:
        """From now on the episode waits for `what`."""
        self.moved += 1
        self._at[spec] = what, asyncio.get_running_loop().time()

    def left(self, spec: EpisodeSpec) -> None:
        """The episode has ended, in whatever way."""
        self.moved += 1
        self._at.pop(spec, None)

    def lines(self) -> list[str]:
        """Who waits for what since when, the longest first."""
        now = asyncio.get_running_loop().time()
        waiting = sorted(self._at.items(), key=lambda item: item[1][1])
        return [f"{name(spec)}: {what}, for {now - since:.0f} s" for spec, (what, since) in waiting]


def name(spec: EpisodeSpec) -> str:
    """An attempt at an episode, for a message."""
    return f"{spec.tag}, group {spec.group}, member {spec.member}, attempt {spec.attempt}"
