"""Hooks of turnwise-jsonl: metrics and full trajectories as JSON lines."""

from turnwise import Implementation, hookimpl


@hookimpl
def loggers() -> list[Implementation]:
    """The `jsonl` logger."""
    return [
        Implementation(
            "jsonl",
            "turnwise_jsonl.logger:JsonlLogger",
            config="turnwise_jsonl.config:JsonlConfig",
            summary="metrics.jsonl and trajectories/{train,val}.jsonl, one JSON object a line",
        )
    ]
