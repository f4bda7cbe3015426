"""vLLM's server as a child of a run: it ends with its parent, and has what a CPU build lacks for images. Its own
children import this first."""

from __future__ import annotations

import runpy

from turnwise_serving.engine.turnwise_child import end_with_the_starter
from turnwise_vllm.images import declare_torchvision

# Seconds between the request to end and the kill: vLLM's processes give their memory back meanwhile.
_PATIENCE = 10.0

declare_torchvision()

if __name__ == "__main__":
    end_with_the_starter(patience=_PATIENCE)
    # This module stays `__main__`, which multiprocessing imports in each child.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
