"""`tests/broken_models.py` and `tests/damaged_checkpoints.py`: a model folder that is broken, or a checkpoint that is
damaged, is a line with the folder and the fix before anything is trained."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def script(name: str) -> Any:
    """A script beside this file."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN = script("mutated_yamls").run
MODELS = script("broken_models")
CHECKPOINTS = script("damaged_checkpoints")


@pytest.fixture(autouse=True)
def _folder_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of which nothing is broken."""
    return MODELS.whole(tmp_path_factory.mktemp("model"))


def test_there_are_eighty_broken_model_folders() -> None:
    names = [one.name for one in MODELS.broken() if not one.fine]
    assert len(set(names)) == len(names) >= 80


@pytest.mark.parametrize("part", range(8))
def test_a_broken_model_folder_is_a_line_that_names_it(model: Path, part: int) -> None:
    mine = list(MODELS.broken())[part::8]
    assert {(one.name, fault) for one in mine for fault in MODELS.judge(one, model, RUN)} == set()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of three steps, and what goes on from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.getbasetemp())
        yield CHECKPOINTS.with_expected(CHECKPOINTS.whole(tmp_path_factory.mktemp("run") / "before", RUN), RUN)


def test_there_are_a_hundred_damaged_checkpoints() -> None:
    names = [one.name for one in CHECKPOINTS.damaged() if not one.harmless]
    assert len(set(names)) == len(names) >= 100


@pytest.mark.parametrize("part", range(8))
def test_a_damaged_checkpoint_is_a_line_that_names_it(
    before: Path, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = list(CHECKPOINTS.damaged())[part::8]
    assert {
        (one.name, fault) for one in mine for fault in CHECKPOINTS.judge(one, before, RUN, MODELS.faults_of)
    } == set()
