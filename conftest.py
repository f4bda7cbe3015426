"""How property tests run in every distribution of this repository."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No test is timed, and none is too slow to draw its examples: machines are noisy, and the first text drawn in a fresh clone builds tables.
settings.register_profile("turnwise", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.load_profile("turnwise")
