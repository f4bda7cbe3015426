"""Hooks of turnwise-openai: a model behind an OpenAI-compatible endpoint, for evaluation and rollout."""

from turnwise import Implementation, hookimpl


@hookimpl
def inference_backends() -> list[Implementation]:
    """`openai`."""
    return [
        Implementation(
            "openai",
            "turnwise_openai.backend:OpenAIBackend",
            config="turnwise_openai.config:OpenAIConfig",
            requires=("httpx2",),
            fixtures="turnwise_openai.fixtures:backend_fixture",
            summary="any OpenAI-compatible endpoint plays: evaluation and rollout, no training",
        )
    ]
