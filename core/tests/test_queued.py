"""The episodes of a checkpoint as a file: read as it was written, and refused in one line whatever is wrong with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.contracts.env_manager import Limits, ManagerContext
from turnwise.contracts.inference import InferenceContext
from turnwise.contracts.rollout import RolloutSettings, TagPlan
from turnwise.data import build_batch
from turnwise.errors import CheckpointError
from turnwise.pipeline import queued
from turnwise.rollout import Scheduler
from turnwise.testing.compare import same, says
from turnwise.testing.fakes import FakeBackend, FakeBackendConfig, FakeChat, FakeEnvironment, FakeEnvManager
from turnwise.testing.ticks import run_in_ticks

SETTINGS = RolloutSettings(
    seed=3, async_generation_ratio=1, max_steps=3, weight_update="between_turns", max_env_failure_rate=0.9
)


def scheduler() -> Scheduler:
    manager = FakeEnvManager(None, ManagerContext(tag="Count", max_turns=3))
    plan = TagPlan("Count", FakeEnvironment, manager, Limits(64, 4, 4, 3), groups=2, group_size=2, step="inline")
    backend = FakeBackend(FakeBackendConfig(token=1.0), InferenceContext(None, FakeChat()))
    return Scheduler([plan], SETTINGS, backend, FakeChat())


@cache
def state() -> dict[str, Any]:
    """Of a run in the middle of step 1: members that have ended, that are open with a record, and that wait."""

    async def run() -> dict[str, Any]:
        playing = scheduler()
        playing.settings = evolve(SETTINGS, max_concurrent=3)
        await playing.next_batch(0, version=0)
        await playing.settled(1)
        await playing.release()
        await asyncio.sleep(5)
        await playing.hold()
        found = playing.state(1)
        await playing.close()
        return found

    return run_in_ticks(run())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    queued.write(tmp_path, state())
    return tmp_path


def resumed(found: dict[str, Any]) -> None:
    """Take up a state and play the step; what is wrong with it is a CheckpointError."""

    async def run() -> None:
        again = scheduler()
        try:
            again.load_state(found)
            result = await again.next_batch(1, version=1)
            build_batch(result.trajectories, result.samples)
        finally:
            await again.close()

    run_in_ticks(run())


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        queued.read(folder)
    says(str(error.value), "rollouts.npz cannot be read", "Fix: resume from another checkpoint.")
    return str(error.value)


def test_it_is_read_as_it_was_written(folder: Path) -> None:
    kinds = [name for group in state()["queue"] for name in ("members", "open", "records") if group.get(name)]
    assert set(kinds) == {"members", "open", "records"}
    assert same(plain(queued.read(folder)), plain(state()))
    resumed(queued.read(folder))


def plain(value: Any) -> Any:
    """For `same`, which does not look into trajectories."""
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in queued.encode(value)]


@given(data=st.data())
def test_a_file_that_is_cut_or_flipped_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("queued")
    queued.write(folder, state())
    whole = (folder / queued.FILE).read_bytes()
    if data.draw(st.booleans()):
        harmed = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
        harmed = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    (folder / queued.FILE).write_bytes(harmed)
    try:
        found = queued.read(folder)
    except CheckpointError as error:
        says(str(error), "rollouts.npz cannot be read", "Fix: resume from another checkpoint.")
    else:  # a bit that zip does not use: a date, an attribute
        assert plain(found) == plain(state())


WHOLE: dict[str, Callable[[bytes, bytes], Any]] = {
    "no file of arrays": lambda record, buffer: b"{}",
    "nothing": lambda record, buffer: b"",
    "one array alone": lambda record, buffer: np.zeros(3),
    "no record": lambda record, buffer: {"buffer": np.frombuffer(buffer, np.uint8)},
    "no buffer": lambda record, buffer: {"record": np.frombuffer(record, np.uint8)},
    "objects": lambda record, buffer: {"record": np.array([{}], object), "buffer": np.zeros(1, np.uint8)},
    "numbers": lambda record, buffer: {
        "record": np.frombuffer(record, np.uint8) * 1.0,
        "buffer": np.zeros(1, np.uint8),
    },
    "numbers in the buffer": lambda record, buffer: {
        "record": np.frombuffer(record, np.uint8),
        "buffer": np.frombuffer(buffer, np.uint8) * 1.0,
    },
    "two rows": lambda record, buffer: {
        "record": np.frombuffer(record + b" " * (len(record) % 2), np.uint8).reshape(2, -1),
        "buffer": np.frombuffer(buffer, np.uint8),
    },
    "a short buffer": lambda record, buffer: arrays(record, buffer[:-8]),
    "no JSON": lambda record, buffer: arrays(b"{", buffer),
    "no text": lambda record, buffer: arrays(b"\xff\xfe\xff", buffer),
    "JSON too deep": lambda record, buffer: arrays(b"[" * 100_000 + b"]" * 100_000, buffer),
    "a list": lambda record, buffer: arrays(b"[]", b""),
    "a number": lambda record, buffer: arrays(b"3", b""),
    "no queue": lambda record, buffer: arrays(b'{"dict": []}', b""),
    "a queue of numbers": lambda record, buffer: arrays(b'{"dict": [["queue", [1, 2]]]}', b""),
}


def arrays(record: bytes, buffer: bytes) -> dict[str, np.ndarray]:
    return {"record": np.frombuffer(record, np.uint8), "buffer": np.frombuffer(buffer, np.uint8)}


@pytest.mark.parametrize("harm", WHOLE)
def test_what_is_no_such_file_is_refused(folder: Path, harm: str) -> None:
    made = WHOLE[harm](*queued.encode(state()))
    path = folder / queued.FILE
    if isinstance(made, bytes):
        path.write_bytes(made)
    else:
        with path.open("wb") as file:
            np.savez(file, **made) if isinstance(made, dict) else np.save(file, made)
    refused(folder)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all parts of JSON data."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


GARBAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.just([]),
    st.just({}),
    st.just([[1, 2], [3, 4]]),
    st.sampled_from(["array", "scalar", "dict", "tuple", "Turn", "Trajectory", "Sample", "named", "bytes"]).map(
        lambda kind: {kind: ["<f8", [2], 0, 16]}
    ),
)


@settings(max_examples=300)
@given(data=st.data())
def test_a_state_of_which_one_part_is_something_else_is_refused_or_played(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text, buffer = queued.encode(state())
    record = json.loads(text)
    *above, last = data.draw(st.sampled_from(places(record)[1:]))
    inner = record
    for key in above:
        inner = inner[key]
    inner[last] = data.draw(GARBAGE)
    folder = tmp_path_factory.mktemp("queued")
    with (folder / queued.FILE).open("wb") as file:
        np.savez(file, **arrays(json.dumps(record).encode(), buffer))  # type: ignore[arg-type]
    try:
        resumed(queued.read(folder))
    except CheckpointError as error:
        says(str(error), "Fix: ")
