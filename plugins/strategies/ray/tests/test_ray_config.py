"""The runtime's options, and what the machine is asked for them; no Ray needed."""

from __future__ import annotations

import pytest

from turnwise_ray.config import RayConfig


def test_the_defaults_start_a_cluster_of_this_machine() -> None:
    config = RayConfig()
    assert (config.address, config.device, config.env_workers) == (None, "auto", 0)


@pytest.mark.parametrize(
    "options", [{"start_timeout": 0}, {"env_workers": -1}, {"max_restarts": -1}, {"cpus_per_process": -1}, {"object_store_mb": 1}]
)
def test_numbers_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        RayConfig(**options)  # type: ignore[arg-type]
