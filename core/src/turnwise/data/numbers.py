"""Numbers that the core and several plugins must agree on."""

from __future__ import annotations

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a number, by the name that `dtype:` gives."""

LARGEST_REWARD = 3.4028234663852886e38
"""The largest number of float32, in which losses are computed; sums and squares of such numbers are finite in float64."""

LOG_RATIO_BOUND = 20.0
"""Differences of log-probs are cut at ± this before they are exponentiated: e²⁰ is past every clip, and no infinity."""
