"""Hooks of turnwise-sglang: inference with an SGLang server, started or attached to."""

from turnwise import Implementation, hookimpl


@hookimpl
def inference_backends() -> list[Implementation]:
    """`sglang`."""
    return [
        Implementation(
            "sglang",
            "turnwise_sglang.backend:SglangBackend",
            config="turnwise_sglang.config:SglangConfig",
            requires=("torch", "httpx2"),
            fixtures="turnwise_sglang.fixtures:backend_fixture",
            summary="SGLang's server, started in an interpreter of its own or attached to, over HTTP",
        )
    ]
