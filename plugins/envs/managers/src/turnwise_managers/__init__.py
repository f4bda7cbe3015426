"""Hooks of turnwise-managers: trajectory and stepwise environment managers."""

from __future__ import annotations

from turnwise import Implementation, hookimpl


@hookimpl
def env_managers() -> list[Implementation]:
    """The two managers of this distribution."""
    return [
        Implementation(
            "trajectory",
            target="turnwise_managers.trajectory:TrajectoryManager",
            config="turnwise_managers.config:TrajectoryConfig",
            summary="one growing conversation per episode, one training sample per trajectory",
        ),
        Implementation(
            "stepwise",
            target="turnwise_managers.stepwise:StepwiseManager",
            config="turnwise_managers.config:StepwiseConfig",
            summary="each turn rendered anew from the last turns, one training sample per turn or merged run of turns",
        ),
    ]
