"""Hooks of turnwise-ray: the runtime on a Ray cluster."""

from turnwise import Implementation, hookimpl


@hookimpl
def runtimes() -> list[Implementation]:
    """Roles as actors."""
    return [
        Implementation(
            "ray",
            "turnwise_ray.runtime:RayRuntime",
            config="turnwise_ray.config:RayConfig",
            requires=("ray",),
            fixtures="turnwise_ray.fixtures:runtime",
            summary="roles, sampling engines and environments as actors on a Ray cluster, of one machine or several",
        )
    ]
