"""Hooks of turnwise-gigpo: group-in-group policy optimisation."""

from turnwise import Implementation, hookimpl


@hookimpl
def advantage_estimators() -> list[Implementation]:
    """One estimator."""
    return [
        Implementation(
            "gigpo",
            "turnwise_gigpo.gigpo:Gigpo",
            config="turnwise_gigpo.config:GigpoConfig",
            summary=(
                "the score normalised in its group, and each turn's return among the group's turns from the same state"
            ),
        )
    ]
