"""Numbers that the core and several plugins must agree on."""

from __future__ import annotations

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a number, by the name that `dtype:` gives."""

LOG_RATIO_BOUND = 20.0
"""Differences of log-probs are cut at ± this before they are exponentiated: e²⁰ is past every clip, and no infinity."""
