"""Hooks of turnwise-gae: generalised advantage estimation."""

from turnwise import Implementation, hookimpl


@hookimpl
def advantage_estimators() -> list[Implementation]:
    """One estimator; it needs the values of a critic."""
    return [
        Implementation(
            "gae",
            "turnwise_gae.gae:Gae",
            config="turnwise_gae.config:GaeConfig",
            summary="generalised advantage estimation over the trajectory's sampled tokens, with a critic",
        )
    ]
