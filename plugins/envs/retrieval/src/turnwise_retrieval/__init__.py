"""Hooks of turnwise-retrieval: questions over a generated corpus, answered by search."""

from turnwise import Implementation, hookimpl


@hookimpl
def environments() -> list[Implementation]:
    """`retrieval`."""
    return [
        Implementation(
            "retrieval",
            target="turnwise_retrieval.retrieval:Retrieval",
            summary=(
                "questions of several hops over generated documents of up to thousands of tokens, answered by search"
            ),
        )
    ]
