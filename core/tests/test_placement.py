"""Which devices a role without `device_mapping` gets, and that everybody who has to know gets the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import load
from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.pipeline import standalone
from turnwise.pipeline.colocation import Colocation
from turnwise.planning import assembly, preflight, transport
from turnwise.planning.placement import effective
from turnwise.testing.fakes import FakeBackend, FakeRuntime, FakeStrategy

Toy = Callable[..., Path]
LOCAL = RuntimeCapabilities(one_process=True)
RAY = RuntimeCapabilities(least_devices=1)
JOINED = RuntimeCapabilities(counts_devices=False)


@pytest.mark.parametrize(
    ("runtime", "visible", "train", "infer", "expected"),
    [
        # In one process: the first device there is, none on a machine without one.
        (LOCAL, 0, (), (), ((), ())),
        (LOCAL, 1, (), (), ((0,), (0,))),
        (LOCAL, 2, (), (), ((0,), (1,))),
        (LOCAL, 2, (1,), (), ((1,), (0,))),
        # In several: devices that no role names, else in turns with the trainer.
        (RAY, 4, (0, 1), (), ((0, 1), (2,))),
        (RAY, 2, (0, 1), (), ((0, 1), (0,))),
        (RAY, 1, (), (), ((0,), (0,))),
        (RAY, 2, (), (0,), ((1,), (0,))),
        (RAY, 4, (2,), (3,), ((2,), (3,))),
        # GPUs of a cluster elsewhere: they are there if any is named, how many nobody knows.
        (JOINED, 0, (0, 1), (), ((0, 1), (2,))),
        (JOINED, 8, (), (), ((), ())),
        # Numbers that are processes.
        (RuntimeCapabilities(gpus=False), 8, (0,), (), ((0,), ())),
    ],
)
def test_a_role_gets_what_it_names_else_what_no_role_names(
    runtime: RuntimeCapabilities,
    visible: int,
    train: tuple[int, ...],
    infer: tuple[int, ...],
    expected: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    found = effective({"actor_train": train, "actor_infer": infer, "reference": ()}, runtime, visible)
    assert (found["actor_train"], found["actor_infer"]) == expected
    assert found["reference"] == (expected[0] if runtime.gpus else ())


def test_a_sampler_whose_engine_runs_already_takes_no_device() -> None:
    assert effective({"actor_train": (0,), "actor_infer": ()}, RAY, 2, attached=True) == {
        "actor_train": (0,),
        "actor_infer": (),
    }


def test_placement_colocation_transport_and_preflight_know_the_same_devices(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler without `device_mapping` lands on the trainer's GPU: it must take turns there, and not meet the trainer
    in an NCCL group."""
    monkeypatch.setattr(assembly, "visible_gpus", lambda: 1)
    monkeypatch.setattr(FakeRuntime, "capabilities", RAY)
    for side in (FakeStrategy, FakeBackend):
        monkeypatch.setattr(
            side, "transports", staticmethod(lambda config, context: ("process_group", "shared_memory"))
        )
    config = load(toy(runtime="fake"), ["actor_train.device_mapping=[0]"]).config
    assert assembly.serve_plan(config, Path(), None).devices == (0,)
    assert assembly.serve_plan(config, Path(), None).context.devices == (0,)
    assert transport.choose(config) == "shared_memory"
    role: Any = None
    assert Colocation(config, {"actor_train": role}, role).shares("actor_infer")


def test_in_one_process_a_role_without_device_mapping_uses_the_first_gpu(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "visible_gpus", lambda: 1)
    config = load(toy()).config
    assert assembly.train_plan(config, "actor_train", Path()).context.devices == (0,)
    assert assembly.serve_plan(config, Path(), None).context.devices == (0,)
    monkeypatch.setattr(standalone, "visible_gpus", lambda: 2)
    # Where `eval` builds an engine that would need a GPU to be built here.
    assert standalone._devices(config) == (0,)
    assert preflight.preflight(config, Path()).config == []
