"""vLLM's server as a child of a run: it ends with its parent, and has what a CPU build lacks for images. Its own children import this first."""

from __future__ import annotations

import os
import runpy
import signal
import threading
import time

from turnwise_vllm.images import declare_torchvision

_LOOK = 1.0


def end_with(parent: int) -> None:
    """End this process group as soon as the parent has gone without ending it."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os.killpg(os.getpgrp(), signal.SIGTERM)


declare_torchvision()

if __name__ == "__main__":
    threading.Thread(target=end_with, args=(int(os.environ["TURNWISE_VLLM_PARENT"]),), daemon=True).start()
    # This module stays `__main__`, which multiprocessing imports in each child.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
