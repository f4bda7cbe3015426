"""The server's side: it ends with the process that started it, and has what a CPU build of its engine lacks. It imports
nothing of Turnwise.

Engines may run in an interpreter of their own: their launchers find this file by the environment variable
TURNWISE_SERVING_ENGINE.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_declared: list[Any] = []
"""torch.library keeps definitions only as long as their Library lives."""


def end_with_the_starter(clean: Callable[[], None] | None = None, patience: float = 0.0) -> None:
    """In a thread: end this process group when the starter's end of standard input closes, and remove the server's
    folder.

    `clean` runs before; with `patience` the group is asked to end, and killed so many seconds later.
    """
    threading.Thread(target=_watch, args=(clean, patience), name="turnwise-starter", daemon=True).start()


def _watch(clean: Callable[[], None] | None, patience: float) -> None:
    # The bare descriptor: a daemon thread inside sys.stdin's buffer would hold its lock when the interpreter ends.
    while os.read(0, 1024):
        pass
    if clean is not None:
        clean()
    # Before the group ends, for this process ends with it.
    if folder := os.environ.get("TURNWISE_SERVER_FOLDER"):
        shutil.rmtree(folder, ignore_errors=True)
    if patience:
        os.killpg(os.getpgid(0), signal.SIGTERM)
        time.sleep(patience)
    # The whole group: engines start processes of their own, which do not watch this end.
    os.killpg(os.getpgid(0), signal.SIGKILL)


def declare_torchvision() -> bool:
    """Declare the two operators for which torchvision's Python registers fakes, where its compiled part cannot be
    loaded.

    The wheel of the package index is linked to CUDA: beside a CPU build of torch it does not import without them.
    Before torchvision is imported. Returns whether it did so now.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _declared:
        return False
    import torch

    for compiled in Path(spec.origin).parent.glob("_C*.so"):
        try:
            # A compiled part that loads brings the operators itself, and to define one twice is an error.
            torch.ops.load_library(str(compiled))
        except OSError:
            continue
        return False
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    return True
