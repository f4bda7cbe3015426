"""`tests/broken_models.py` and `tests/damaged_checkpoints.py`: a model folder that is broken, or a checkpoint that is
damaged, is a line with the folder and the fix before anything is trained."""

from __future__ import annotations

from pathlib import Path

import broken_models
import damaged_checkpoints
import pytest


@pytest.fixture(autouse=True)
def _folder_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of which nothing is broken."""
    return broken_models.whole(tmp_path_factory.mktemp("model"))


def test_there_are_eighty_broken_model_folders() -> None:
    names = [one.name for one in broken_models.broken() if not one.fine]
    assert len(set(names)) == len(names) >= 80


@pytest.mark.parametrize("part", range(8))
def test_a_broken_model_folder_is_a_line_that_names_it(model: Path, part: int) -> None:
    mine = list(broken_models.broken())[part::8]
    assert {(one.name, fault) for one in mine for fault in broken_models.judge(one, model)} == set()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, and what goes on from it."""
    return damaged_checkpoints.whole(tmp_path_factory.mktemp("run") / "before")


def test_there_are_a_hundred_damaged_checkpoints() -> None:
    names = [one.name for one in damaged_checkpoints.damaged() if not one.harmless]
    assert len(set(names)) == len(names) >= 100


@pytest.mark.parametrize("part", range(8))
def test_a_damaged_checkpoint_is_a_line_that_names_it(before: Path, part: int) -> None:
    mine = list(damaged_checkpoints.damaged())[part::8]
    assert {(one.name, fault) for one in mine for fault in damaged_checkpoints.judge(one, before)} == set()
