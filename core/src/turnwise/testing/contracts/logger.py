"""What every logger keeps: it takes any number and any name, goes on after a resume, closes twice, and stays in its own
files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from turnwise.contracts.logger import LoggerContext
from turnwise.testing.subject import Subject
from turnwise.testing.synthetic import trajectories

KIND = "logger"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder; the process stands in another one, which must stay empty."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "other.txt").write_text("of somebody else", encoding="utf-8")
    return tmp_path / "run"


def build(implementation: Subject, folder: Path) -> Any:
    return implementation.build(LoggerContext(folder, exp_name="conformance", max_steps=10, config={"seed": 1}))


def test_numbers_of_every_kind_and_new_names_are_logged(implementation: Subject, folder: Path) -> None:
    logger = build(implementation, folder)
    logger.scalars(
        0, {"policy/loss": math.nan, "policy/kl": math.inf, "critic/score/mean": np.float32(0.5), "time/step": 1}
    )  # type: ignore[dict-item]
    logger.scalars(1, {"a name/that nobody/knows [é]": -math.inf})
    logger.scalars(2, {})
    logger.scalars(2, {"val/tag/success": 0.5})
    logger.close()


def test_trajectories_of_every_kind_are_logged(implementation: Subject, folder: Path) -> None:
    made = trajectories()
    image = np.zeros((2, 2, 3), np.uint8)
    turn = evolve(made[1].turns[0], logprobs=None, observation=[{"type": "image", "image": image}], images=(0,))
    odd = evolve(made[1], turns=(turn,), images=(image,), success=None, metrics={"x": math.nan})
    logger = build(implementation, folder)
    logger.trajectories(0, "train", [*made, odd])
    logger.trajectories(0, "val", [])
    logger.close()


def test_artifacts_of_every_kind_are_taken(implementation: Subject, folder: Path) -> None:
    (folder / "frame.png").write_bytes(PNG)
    (folder / "notes.bin").write_bytes(b"\x00\x01")
    logger = build(implementation, folder)
    logger.artifact(0, "val/tag/frame", folder / "frame.png")
    logger.artifact(0, "notes", folder / "notes.bin")
    logger.close()
    assert (folder / "frame.png").read_bytes() == PNG


def test_it_resumes_in_the_same_folder_and_at_the_start(implementation: Subject, folder: Path) -> None:
    first = build(implementation, folder)
    first.resume(0)
    for step in range(4):
        first.scalars(step, {"policy/loss": float(step)})
        first.trajectories(step, "train", trajectories(groups=1))
    first.close()
    second = build(implementation, folder)
    # Steps 2 and 3 were logged before the run fell back to a checkpoint of step 2.
    second.resume(2)
    second.scalars(2, {"policy/loss": 20.0})
    second.trajectories(2, "train", trajectories(groups=1))
    second.close()


def test_it_closes_twice_and_before_anything_was_logged(implementation: Subject, folder: Path) -> None:
    logger = build(implementation, folder)
    logger.close()
    logger.close()


def test_it_stays_in_its_own_files(implementation: Subject, folder: Path) -> None:
    logger = build(implementation, folder)
    logger.scalars(0, {"policy/loss": 1.0})
    logger.trajectories(0, "train", trajectories(groups=1))
    logger.resume(0)
    logger.close()
    assert (folder / "other.txt").read_text(encoding="utf-8") == "of somebody else", (
        "a file of somebody else was changed."
    )
    assert not list((folder.parent / "elsewhere").iterdir()), (
        "something was written to the current folder. Fix: write below context.folder."
    )
