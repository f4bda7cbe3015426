"""Engines that are replaced while all are asked for something; no cluster is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from turnwise.errors import EngineLost
from turnwise_ray.backend import RayBackend
from turnwise_ray.members import Member

pytestmark = pytest.mark.engines


class Backend(RayBackend):
    """Two engines: the first one's actor `old` has ended; while the second one answers, the watcher puts `new` in its
    place."""

    def __init__(self) -> None:
        super().__init__(
            cast(Any, SimpleNamespace(role="actor_infer")), cast(Any, None), cast(Any, None), 60.0, None, lambda: None
        )
        self.quick = Member(0, [], "old", readers={"fake": 1})
        self.slow = Member(1, [], "slow", readers={"fake": 1})
        self._members = [self.quick, self.slow]
        self.asked: list[str] = []

    async def _do(self, member: Member, method: str, *args: Any) -> Any:
        self.asked.append(member.actor)
        if member.actor == "old":
            raise EngineLost("it ended")
        if member.actor == "slow":
            await asyncio.sleep(0.05)
            self.quick.actor, self.quick.lost = "new", False


def test_the_engine_in_the_place_of_a_lost_one_is_not_lost() -> None:
    backend = Backend()
    asyncio.run(backend.resume())
    assert backend.receivers("fake") == 2


def test_an_engine_that_comes_up_during_a_pause_is_paused_too() -> None:
    backend = Backend()
    asyncio.run(backend.pause())
    assert backend.asked == ["old", "slow", "new"]
