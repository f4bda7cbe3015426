"""Hooks of turnwise-console: metrics and progress in the terminal (rich)."""

from turnwise import Implementation, hookimpl


@hookimpl
def loggers() -> list[Implementation]:
    """The `console` logger."""
    return [
        Implementation(
            "console",
            "turnwise_console.logger:ConsoleLogger",
            config="turnwise_console.config:ConsoleConfig",
            requires=("rich",),
            aliases=("stdout",),
            summary="one line a step and a progress bar in the terminal",
        )
    ]
