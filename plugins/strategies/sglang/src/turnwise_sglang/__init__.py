"""Hooks of turnwise-sglang: configurations for SGLang, planned and checked; the engine itself does not run in this version."""

from turnwise import Implementation, hookimpl


@hookimpl
def inference_backends() -> list[Implementation]:
    """`sglang`."""
    return [
        Implementation(
            "sglang",
            "turnwise_sglang.backend:SglangBackend",
            config="turnwise_sglang.config:SglangConfig",
            requires=("sglang",),
            plans_only=True,
            summary="configurations for SGLang; this version plans and checks them, it does not run the engine",
        )
    ]
