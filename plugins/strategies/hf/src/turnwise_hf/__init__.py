"""Hooks of turnwise-hf: the model source and inference with Hugging Face transformers."""

from turnwise import Implementation, hookimpl


@hookimpl
def model_sources() -> list[Implementation]:
    """Folders in Hugging Face layout, hub ids, and recipes for tiny local models."""
    return [
        Implementation(
            "hf",
            "turnwise_hf.source:HfModelSource",
            requires=("torch", "transformers"),
            fixtures="turnwise_hf.fixtures:source_fixture",
            summary="a folder, a hub id, or a recipe for a tiny local model",
        )
    ]


@hookimpl
def inference_backends() -> list[Implementation]:
    """Inference with unmodified causal models of transformers."""
    return [
        Implementation(
            "hf",
            "turnwise_hf.backend:HfBackend",
            config="turnwise_hf.config:HfConfig",
            requires=("torch", "transformers"),
            aliases=("hf_infer",),
            fixtures="turnwise_hf.fixtures:backend_fixture",
            summary="transformers in this process: all waiting episodes in one batch, weights shared with the trainer",
        )
    ]
