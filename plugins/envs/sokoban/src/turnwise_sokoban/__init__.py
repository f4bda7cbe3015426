"""Hooks of turnwise-sokoban: procedurally generated, always solvable Sokoban rooms."""

from turnwise import Implementation, hookimpl


@hookimpl
def environments() -> list[Implementation]:
    """`sokoban`."""
    return [
        Implementation(
            "sokoban",
            target="turnwise_sokoban.sokoban:Sokoban",
            summary="Sokoban: random rooms, always solvable, held out by content",
        )
    ]
