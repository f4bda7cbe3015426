"""Hooks of turnwise-rlvr: questions with checkable answers, and the player that knows them."""

from turnwise import Implementation, hookimpl


@hookimpl
def environments() -> list[Implementation]:
    """`rlvr`."""
    return [
        Implementation(
            "rlvr",
            target="turnwise_rlvr.rlvr:Rlvr",
            fixtures="turnwise_rlvr.fixtures:environment_fixture",
            summary="questions of data sets whose answers are checked by rules or a judge: mathematics, exact text, choices",
        )
    ]


@hookimpl
def inference_backends() -> list[Implementation]:
    """The scripted player of `rlvr`."""
    return [
        Implementation(
            "known_answer",
            target="turnwise_rlvr.known:KnownAnswer",
            fixtures="turnwise_rlvr.fixtures:player_fixture",
            summary="a baseline without a model: gives rlvr the known answer, which every verifier must accept",
        )
    ]
