"""What the conformance kit needs to build the logger: no service."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from turnwise_wandb.config import WandbConfig


def logger_fixture() -> dict[str, Any]:
    """Offline, without a look at the machine; what W&B keeps in a home goes to a temporary folder,
    hidden as its caches are."""
    kept = tempfile.mkdtemp(prefix=".turnwise-wandb-")
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        os.environ.setdefault(name, kept)
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return {"config": WandbConfig(mode="offline", system_metrics=False)}
