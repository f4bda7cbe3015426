"""Connectors keep keys and values outside vLLM's own cache: a weight update has to drop theirs, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DROPPED = frozenset({"MooncakeStoreConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"})
"""Those that vLLM 0.32 empties with its own cache. Any other goes on serving what old weights made, without a word."""


def outlasting(transfer: Any) -> list[str]:  # Any: a kv_transfer_config, None, or what vLLM will refuse
    """The connectors of a kv_transfer_config whose caches outlast a weight update."""
    if isinstance(transfer, str):
        try:
            transfer = json.loads(transfer)
        except ValueError:
            return []
    if not isinstance(transfer, Mapping) or transfer.get("kv_connector") is None:
        return []
    name = str(transfer["kv_connector"])
    if name == "MultiConnector":
        parts = (transfer.get("kv_connector_extra_config") or {}).get("connectors") or ()
        return [found for part in parts for found in outlasting(part)]
    return [] if name in DROPPED else [name]
