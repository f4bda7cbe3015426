"""The process in which vLLM inspects a model's class, with what a CPU build lacks for images; its work comes by
standard input."""

from __future__ import annotations

from turnwise_vllm.images import declare_torchvision

if __name__ == "__main__":
    declare_torchvision()
    from vllm.model_executor.models import registry

    registry._run()
