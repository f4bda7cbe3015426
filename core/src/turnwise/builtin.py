"""The core's own implementations, through the same door as everybody's."""

from turnwise.hookspecs import Implementation, hookimpl


@hookimpl
def runtimes() -> list[Implementation]:
    """The local runtime: every role in this process."""
    return [
        Implementation(
            "local",
            "turnwise.pipeline.local:LocalRuntime",
            summary="every role in this process, training on its own thread",
        )
    ]
