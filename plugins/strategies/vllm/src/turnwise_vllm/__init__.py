"""Hooks of turnwise-vllm: configurations for vLLM, planned and checked; the engine itself does not run in this version."""

from turnwise import Implementation, hookimpl


@hookimpl
def inference_backends() -> list[Implementation]:
    """`vllm`."""
    return [
        Implementation(
            "vllm",
            "turnwise_vllm.backend:VllmBackend",
            config="turnwise_vllm.config:VllmConfig",
            requires=("vllm",),
            plans_only=True,
            summary="configurations for vLLM; this version plans and checks them, it does not run the engine",
        )
    ]
