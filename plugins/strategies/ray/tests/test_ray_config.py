"""The runtime's options, and what the machine is asked for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from turnwise.contracts.inference import BackendCapabilities
from turnwise_ray import config
from turnwise_ray.config import RayConfig


def test_the_defaults_start_a_cluster_of_this_machine() -> None:
    config = RayConfig()
    assert (config.address, config.device, config.env_workers) == (None, "auto", 0)


@pytest.mark.parametrize(
    "options",
    [
        {"start_timeout": 0},
        {"env_worker_timeout": 0},
        {"env_workers": -1},
        {"max_restarts": -1},
        {"cpus_per_process": -1},
        {"object_store_mb": 1},
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        RayConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "there", "expected"),
    [
        ({}, 0, 0),
        ({}, 2, 1),
        ({"device": "cpu"}, 2, 0),
        ({"device": "gpu"}, 0, 1),
        ({"address": "auto"}, 2, 0),  # another machine's are not known
        ({"address": "auto", "device": "gpu"}, 0, 1),
    ],
)
def test_gpus_of_a_role_that_names_none(
    options: dict[str, str], there: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "visible_gpus", lambda: there)
    assert RayConfig(**options).capabilities.least_devices == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "here"),
    [({}, True), ({"device": "gpu"}, True), ({"device": "cpu"}, False), ({"address": "auto"}, False)],
)
def test_device_mapping_names_gpus_of_this_machine_or_not(options: dict[str, str], here: bool) -> None:
    assert RayConfig(**options).capabilities.counts_devices == here  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "expected"), [({}, [[0], [1], [2], [3]]), ({"devices_per_engine": 2}, [[0, 1], [2, 3]])]
)
def test_a_server_of_several_copies_is_one_engine(sizes: dict[str, int], expected: list[list[int]]) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    from turnwise_ray.members import parts

    config = SimpleNamespace(capabilities=BackendCapabilities(data_parallel_size=lambda world: world, **sizes))
    plan: Any = SimpleNamespace(devices=(0, 1, 2, 3), role="actor_infer", implementation="x", config=config)
    seats: Any = [0, 1, 2, 3]
    assert parts(plan, seats) == expected
