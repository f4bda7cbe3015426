"""What the conformance kit needs to test the runtime: a small cluster of its own."""

from __future__ import annotations

from typing import Any

from turnwise.contracts.runtime import RuntimeContext
from turnwise_ray.config import RayConfig


def runtime() -> dict[str, Any]:
    """CPU processes; the fakes are a plugin that every process declares."""
    return {
        "config": RayConfig(device="cpu", start_timeout=120, log_to_driver=False, object_store_mb=100),
        "context": RuntimeContext(timeout=60.0, plugins=("turnwise.testing.plugin",)),
    }
