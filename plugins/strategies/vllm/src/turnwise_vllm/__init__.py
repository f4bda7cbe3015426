"""Hooks of turnwise-vllm: inference with vLLM's asynchronous engine."""

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
            fixtures="turnwise_vllm.fixtures:backend_fixture",
            summary="vLLM's asynchronous engine: in this process, a server started for the run, or one that is there",
        )
    ]
