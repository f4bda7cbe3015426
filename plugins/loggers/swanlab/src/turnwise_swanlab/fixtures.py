"""What the conformance kit needs to build the logger: no service."""

from __future__ import annotations

from typing import Any

from turnwise_swanlab.config import SwanlabConfig


def logger_fixture() -> dict[str, Any]:
    """Offline, without a look at the machine."""
    return {"config": SwanlabConfig(mode="offline", system_metrics=False)}
