"""What this machine has, found without any engine."""

from __future__ import annotations

import os
import re
from pathlib import Path


def visible_gpus() -> int:
    """NVIDIA devices that this process may use, counted without any engine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA shows a process what is listed here; the device files show all.
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() and d.strip() != "-1"])
    folder = Path("/dev")
    return sum(bool(re.fullmatch(r"nvidia\d+", p.name)) for p in folder.glob("nvidia*"))
