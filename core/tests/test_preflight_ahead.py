"""Devices of a run that plays while it trains: none is the sampler's and a training role's, whoever chose it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy_runs import Toy, found, plugin, runtimes

from turnwise.planning import assembly, device_problems

RUNTIMES = runtimes({"many": "counts_devices=True, least_devices=1", "one": "counts_devices=True, one_process=True"})
ROLE = {
    "training_args": {"learning_rate": 1.0, "per_device_train_batch_size": 2},
    "strategy_args": {"strategy_name": "fake"},
}
CHOSEN = " (the runtime's choice)"


@pytest.fixture
def clashes(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`clashes(gpus, *overrides, **changes)`: what is said of devices that two sides would use at the same time."""

    def look(gpus: int, *overrides: str, **changes: Any) -> list[str]:
        for asks in (device_problems, assembly):
            monkeypatch.setattr(asks, "visible_gpus", lambda: gpus)
        path = toy(plugins=plugin(tmp_path, RUNTIMES), **{"runtime": "many", **changes})
        return [line for line in found(path, *overrides).config if "plays while the trainer trains" in line]

    return look


def line(role: str, device: str, sampler: str = "", trainer: str = "") -> str:
    return (
        f"$.async_generation_ratio: 1 plays while the trainer trains, and $.actor_infer.device_mapping{sampler} shares"
        f" device {device} with $.{role}.device_mapping{trainer}. Fix: devices of its own for actor_infer, or"
        " async_generation_ratio: 0"
    )


def on(role: str, *devices: int) -> str:
    return f"{role}.device_mapping={list(devices)}"


AHEAD = "async_generation_ratio=1"


def test_devices_that_are_written(clashes: Any) -> None:
    both = [on("actor_train", 0, 1), on("actor_infer", 1, 2)]
    assert clashes(3, *both) == []
    assert clashes(3, AHEAD, *both) == [line("actor_train", "1")]
    assert clashes(3, AHEAD, on("actor_train", 0, 1), on("actor_infer", 2)) == []
    assert clashes(3, AHEAD, on("actor_train", 0, 1), on("actor_infer", 1, 0)) == [line("actor_train", "0, 1")]


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_devices_of_the_other_training_roles(clashes: Any, role: str) -> None:
    more: dict[str, Any] = (
        {"adv_estimator": "gae", "critic": ROLE} if role == "critic" else {"kl_loss_coef": 0.1, "reference": ROLE}
    )
    apart = [AHEAD, on("actor_train", 0), on("actor_infer", 1)]
    assert clashes(2, *apart, on(role, 0), **more) == []
    assert clashes(2, *apart, on(role, 1), **more) == [line(role, "1")]
    # Without numbers a second training role is where the actor is.
    alike = [AHEAD, on("actor_train", 0), on("actor_infer", 0)]
    assert clashes(2, *alike, **more) == [line("actor_train", "0"), line(role, "0")]


def test_a_reference_that_nothing_needs_shares_nothing(clashes: Any) -> None:
    apart = [AHEAD, on("actor_train", 0), on("actor_infer", 1)]
    assert clashes(2, *apart, on("reference", 1), reference=ROLE) == []


@pytest.mark.parametrize("runtime", ["many", "one"])
def test_devices_that_the_runtime_chooses(clashes: Any, runtime: str) -> None:
    assert clashes(1, AHEAD, runtime=runtime) == [line("actor_train", "0", CHOSEN, CHOSEN)]
    assert clashes(1, AHEAD, on("actor_infer", 0), runtime=runtime) == ([line("actor_train", "0", "", CHOSEN)])
    assert clashes(1, AHEAD, on("actor_train", 0), runtime=runtime) == ([line("actor_train", "0", CHOSEN)])
    assert clashes(1, runtime=runtime) == []


def test_devices_that_are_free_are_chosen_apart(clashes: Any) -> None:
    assert clashes(2, AHEAD) == []
    assert clashes(2, AHEAD, on("actor_train", 1)) == []


def test_one_process_without_a_gpu_may_do_both(clashes: Any) -> None:
    assert clashes(0, AHEAD, runtime="one") == []
    assert clashes(0, AHEAD, runtime="fake_runtime") == []
