"""What every logger keeps: it takes any number and any name, forgets on a resume what is played again, closes twice, and
stays in its own files."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from turnwise.contracts.logger import LoggerCapabilities, LoggerContext
from turnwise.testing.subject import Subject
from turnwise.testing.synthetic import played, trajectories
from turnwise.testing.writes import writes

KIND = "logger"
# A picture of one pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder; the process stands in another one, and temporary files have a third."""
    for name in ("elsewhere", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "other.txt").write_text("of somebody else", encoding="utf-8")
    return tmp_path / "run"


def build(implementation: Subject, folder: Path) -> Any:
    """The logger of a run in `folder`."""
    return implementation.build(LoggerContext(folder, exp_name="conformance", max_steps=10, config={"seed": 1}))


def test_numbers_of_every_kind_and_new_names_are_logged(implementation: Subject, folder: Path) -> None:
    """NaN, infinities, numpy's scalars."""
    logger = build(implementation, folder)
    logger.scalars(
        0, {"policy/loss": math.nan, "policy/kl": math.inf, "critic/score/mean": np.float32(0.5), "time/step": 1}
    )  # type: ignore[dict-item]
    logger.scalars(1, {"a name/that nobody/knows [é]": -math.inf})
    logger.scalars(2, {})
    logger.scalars(2, {"val/tag/success": 0.5})
    logger.close()


def test_trajectories_of_every_kind_are_logged(implementation: Subject, folder: Path) -> None:
    """Without log-probs, with images, with a metric that is NaN, and none at all."""
    made = trajectories()
    image = np.zeros((2, 2, 3), np.uint8)
    turn = evolve(made[1].turns[0], logprobs=None, observation=[{"type": "image", "image": image}], images=(0,))
    odd = evolve(made[1], turns=(turn,), images=(image,), success=None, metrics={"x": math.nan})
    logger = build(implementation, folder)
    logger.trajectories(0, "train", [*made, odd])
    logger.trajectories(0, "val", [])
    logger.close()


def test_artifacts_of_every_kind_are_taken(implementation: Subject, folder: Path) -> None:
    """A picture, and a file that is nothing known."""
    (folder / "frame.png").write_bytes(PNG)
    (folder / "notes.bin").write_bytes(b"\x00\x01")
    logger = build(implementation, folder)
    logger.artifact(0, "val/tag/frame", folder / "frame.png")
    logger.artifact(0, "notes", folder / "notes.bin")
    logger.close()
    assert (folder / "frame.png").read_bytes() == PNG


def log_steps(logger: Any, steps: Iterable[int], text: str = "step") -> None:
    """Log steps whose number and whose text are found nowhere else."""
    for step in steps:
        logger.scalars(step, {"policy/loss": _number(step, text), "critic/score/mean": _number(step, text)})
        for split in ("train", "val"):
            turns = [evolve(turn, text=_said(step, text), action=_said(step, text)) for turn in played(0, 0).turns]
            logger.trajectories(step, split, [evolve(played(0, 0), turns=tuple(turns))])


def _said(step: int, text: str) -> str:
    return f"said-in-{text}-{step}"


def _number(step: int, text: str) -> float:
    return 7100.25 + step + (100 if text == "anew" else 0)  # exact as a float32, and so written with these digits


def marks(folder: Path, step: int, text: str = "step") -> set[str]:
    """The text files below `folder` in which something of this step stands. Other formats can only be added to."""
    wanted = (_said(step, text), str(_number(step, text)))
    return {
        f"{path.relative_to(folder)} ({mark})"
        for path in folder.rglob("*")
        if path.is_file()
        for mark in wanted
        if mark in _text(path)
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@pytest.mark.parametrize("step", [0, 2])
def test_it_forgets_what_is_played_again(implementation: Subject, folder: Path, step: int) -> None:
    """And keeps what came before."""
    first = build(implementation, folder)
    first.resume(0)
    log_steps(first, range(4))
    first.close()
    before = {number: marks(folder, number) for number in range(4)}
    unresumed = folder.with_name("unresumed")
    shutil.copytree(folder, unresumed)
    # The run fell back to a checkpoint of `step`: what comes after it was logged, and is played again.
    second = build(implementation, folder)
    second.resume(step)
    log_steps(second, [step], "anew")
    second.close()
    after = {number: marks(folder, number) for number in range(4)}
    if implementation.capabilities(LoggerCapabilities).only_adds:
        lost = set().union(*(before[number] - after[number] for number in range(4)))
        assert not lost, f"it only adds, and yet resume({step}) dropped: {', '.join(sorted(lost))}."
        assert marks(folder, step, "anew") or not before[step], f"what was logged after resume({step}) is not there."
        return
    stale = set().union(*(after[number] for number in range(step, 4)))
    assert not stale, (
        f"after resume({step}) there is still, of step {step} or later: {', '.join(sorted(stale))}. Fix: drop what was"
        " logged for this step and later."
    )
    for number in range(step):
        lost = before[number] - after[number]
        assert not lost, f"resume({step}) dropped what was logged before it: {', '.join(sorted(lost))}."
    assert marks(folder, step, "anew") or not before[step], f"what was logged after resume({step}) is not in its files."
    if any(before.values()):
        return
    # In a format that is no text, a resume must at least leave other files than no resume at all.
    third = build(implementation, unresumed)
    log_steps(third, [step], "anew")
    third.close()
    written = _sizes(folder) != _sizes(unresumed)
    assert written or not _sizes(folder), f"resume({step}) had no effect on its files."


def _sizes(folder: Path) -> list[int]:
    return sorted(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "other.txt")


def test_it_closes_twice_and_before_anything_was_logged(implementation: Subject, folder: Path) -> None:
    """As a run does that ends early."""
    logger = build(implementation, folder)
    logger.close()
    logger.close()


def test_it_stays_in_its_own_files(implementation: Subject, folder: Path) -> None:
    """Below the run's folder, and none of another's."""
    with writes() as written:
        logger = build(implementation, folder)
        log_steps(logger, range(2))
        (folder / "frame.png").write_bytes(PNG)
        logger.artifact(0, "val/tag/frame", folder / "frame.png")
        logger.resume(1)
        log_steps(logger, [1])
        logger.close()
    assert (folder / "other.txt").read_text(encoding="utf-8") == "of somebody else", (
        "a file of somebody else was changed."
    )
    left = sorted(str(path) for path in written if path.exists() and not _is_its_own(path, folder))
    assert not left, f"it wrote outside its folder: {', '.join(left)}. Fix: write below context.folder."


def _is_its_own(path: Path, folder: Path) -> bool:
    """In its folder or the one for temporary files, no file at all (a terminal), or a library's cache or settings,
    which lie in hidden folders."""
    if path.is_relative_to(folder) or path.is_relative_to(tempfile.gettempdir()):
        return True
    if not (path.is_file() or path.is_dir()):
        return True
    return "__pycache__" in path.parts or any(part.startswith(".") for part in path.parts)
