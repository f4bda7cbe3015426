"""Checkpoints are whole or not there: atomic writes, verified reads, what `resume` means, and pruning."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.errors import CheckpointError, EngineError
from turnwise.pipeline import checkpoint
from turnwise.pipeline.checkpoint import prune, set_aside
from turnwise.planning.resume import MANIFEST, differences, listed, read, step_of, to_resume

STATE = {"kl_coef": 0.25, "scheduler": {"queue": []}}
Write = Callable[[Path], Awaitable[None]]


def writes(**files: bytes) -> Write:
    """A writer of these files, each in a role's folder, with an empty folder beside."""

    async def write(folder: Path) -> None:
        for name, content in files.items():
            path = folder / "actor_train" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        (folder / "model").mkdir()

    return write


def saved(root: Path, step: int, state: dict[str, Any] | None = None, write: Write | None = None) -> Path:
    return asyncio.run(checkpoint.save(root, step, state or STATE, write or writes(weights=b"12345")))


def left_in(root: Path) -> list[str]:
    """Everything under `root`, hidden things too."""
    return sorted(p.name for p in root.iterdir())


def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a" / "checkpoints", 7, {"kl_coef": 0.1, "nan": float("inf"), "deep": [{"x": 1}]})
    assert folder.name == "checkpoint-000007"
    got = read(folder)
    assert (got.folder, got.step, dict(got.state)) == (
        folder,
        7,
        {"kl_coef": 0.1, "nan": float("inf"), "deep": [{"x": 1}]},
    )
    assert (folder / "actor_train" / "weights").read_bytes() == b"12345"
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["files"] == {"actor_train/weights": {"size": 5, "sha256": hashlib.sha256(b"12345").hexdigest()}}
    assert left_in(folder.parent) == ["checkpoint-000007"]


def test_nothing_has_its_name_before_everything_is_written(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    async def write(folder: Path) -> None:
        (folder / "weights").write_bytes(b"1")
        seen.append([p.name for p in listed(tmp_path)])

    saved(tmp_path, 1, write=write)
    assert seen == [[]]
    assert [p.name for p in listed(tmp_path)] == ["checkpoint-000001"]


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError("quota"), "quota"),
        (CheckpointError("the disk is full"), "the disk is full"),
    ],
)
def test_a_full_disk_leaves_no_half_checkpoint_and_the_older_ones_whole(
    tmp_path: Path, raised: Exception, line: str
) -> None:
    older = saved(tmp_path, 1)

    async def write(folder: Path) -> None:
        (folder / "weights").write_bytes(b"half")
        raise raised

    with pytest.raises(
        CheckpointError,
        match=rf"^checkpoint-000002 could not be written to .*: {line}\. Older checkpoints are untouched\. Fix:",
    ) as caught:
        saved(tmp_path, 2, write=write)
    assert caught.value.__cause__ is raised
    assert left_in(tmp_path) == ["checkpoint-000001"]
    assert read(older).step == 1
    assert to_resume(True, tmp_path).folder == older  # type: ignore[union-attr]


def test_a_disk_that_cannot_make_it_durable_is_reported_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        saved(tmp_path, 1)
    assert left_in(tmp_path) == []


def test_any_other_error_of_a_role_comes_through_and_leaves_nothing(tmp_path: Path) -> None:
    async def write(folder: Path) -> None:
        (folder / "weights").write_bytes(b"half")
        raise EngineError("lost a rank")

    with pytest.raises(EngineError, match="lost a rank"):
        saved(tmp_path, 1, write=write)
    assert left_in(tmp_path) == []


def test_a_root_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        saved(tmp_path / "checkpoints", 1)


def test_saving_a_step_again_replaces_it_and_clears_what_a_killed_run_left(tmp_path: Path) -> None:
    saved(tmp_path, 1, {"kl_coef": 1.0}, writes(weights=b"old", more=b"x"))
    (tmp_path / ".tmp-checkpoint-000005").mkdir()
    (tmp_path / ".tmp-checkpoint-000005" / "half").write_text("h")
    folder = saved(tmp_path, 1, {"kl_coef": 2.0}, writes(weights=b"new"))
    assert read(folder).state == {"kl_coef": 2.0}
    assert sorted(p.name for p in (folder / "actor_train").iterdir()) == ["weights"]
    assert left_in(tmp_path) == ["checkpoint-000001"]


# ---------------------------------------------------------------- reading


def cut(folder: Path) -> None:
    (folder / "actor_train" / "weights").write_bytes(b"123")


def lose(folder: Path) -> None:
    (folder / "actor_train" / "weights").unlink()


def manifest(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / MANIFEST).write_text(text)

    return write


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (cut, r"checkpoint .*checkpoint-000003 is cut short: actor_train/weights has 3 bytes of 5\. Fix: name another"),
        (lose, r"is incomplete: actor_train/weights is missing\. Fix:"),
        (lambda folder: (folder / MANIFEST).unlink(), r"is not a checkpoint: it has no manifest\.json\. Fix:"),
        (manifest('{"step": 3, "sta'), r"manifest\.json is cut short or not a manifest \("),
        (manifest(""), r"is cut short or not a manifest \("),
        (manifest("[]"), r"is cut short or not a manifest \("),
        (manifest("null"), r"is cut short or not a manifest \("),
        (manifest('{"step": 3, "state": {}}'), r"is cut short or not a manifest \(KeyError: 'files'\)"),
        (manifest('{"step": "three", "state": {}, "files": {}}'), r"is cut short or not a manifest \("),
        (manifest('{"step": 3, "state": {}, "files": ["weights"]}'), r"is cut short or not a manifest \("),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_line(tmp_path: Path, damage: Callable[[Path], None], expected: str) -> None:
    folder = saved(tmp_path, 3)
    damage(folder)
    for setting in (True, str(folder)):
        with pytest.raises(CheckpointError, match=expected) as caught:
            to_resume(setting, tmp_path)
        assert "\n" not in str(caught.value)
        assert "resume_from_checkpoint: false to start anew" in str(caught.value)


def test_resume_means_none_the_newest_or_the_named_one(tmp_path: Path) -> None:
    assert to_resume(True, tmp_path / "nothing yet") is None
    folders = [saved(tmp_path, step) for step in (2, 10, 4)]
    assert to_resume(False, tmp_path) is None
    assert [to_resume(setting, tmp_path).step for setting in (True, str(folders[0]))] == [10, 2]  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"nowhere is not a checkpoint: it has no manifest\.json"):
        to_resume(str(tmp_path / "nowhere"), tmp_path)


def test_the_newest_is_that_of_the_most_steps_and_other_names_do_not_count(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 5):
        saved(tmp_path, step)
    for other in ("checkpoint-000009.bak", "checkpoint-", ".tmp-checkpoint-000010", "checkpoint-best"):
        (tmp_path / other).mkdir()
    (tmp_path / "checkpoint-000011").write_text("a file")
    assert [step_of(p) for p in listed(tmp_path)] == [5, 999_999, 1_000_000]


@pytest.mark.parametrize(
    ("keep", "left"), [(None, [1, 2, 3, 10]), (1, [10]), (2, [3, 10]), (4, [1, 2, 3, 10]), (9, [1, 2, 3, 10])]
)
def test_pruning_keeps_the_newest(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    for step in (1, 2, 10, 3):
        saved(tmp_path, step)
    prune(tmp_path, keep)
    assert [step_of(p) for p in listed(tmp_path)] == left


def test_a_flipped_bit_is_damage(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1)
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in manifest["files"]:
        path = folder / name
        before = path.read_bytes()
        if before:
            path.write_bytes(bytes([before[0] ^ 1]) + before[1:])
            assert read(folder, contents=False).step == 1  # its size is what it was
            with pytest.raises(CheckpointError, match=f"is damaged: the contents of {name} are not what was written"):
                read(folder)
            path.write_bytes(before)
    assert read(folder).step == 1


# ---------------------------------------------------------------- a run in the folder of another


def test_a_manifest_is_what_was_written_or_damaged(tmp_path: Path) -> None:
    folder = saved(tmp_path, 3, {"kl_coef": 0.25, "rates": {10: 1.0, 9: float("nan")}, "pair": (1, 2)})
    content = json.loads((folder / MANIFEST).read_text())
    assert read(folder).state["pair"] == [1, 2]
    (folder / MANIFEST).write_text(json.dumps({key: value for key, value in content.items() if key != "sha256"}))
    assert read(folder).step == 3  # as an earlier version wrote it
    content["state"]["kl_coef"] = 0.75
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"damaged: it is not what was written\. Fix: "):
        read(folder)


def test_a_checkpoint_under_the_name_of_another_step_is_refused_and_under_any_other_name_is_not(tmp_path: Path) -> None:
    folder = saved(tmp_path, 3)
    assert read(folder.rename(tmp_path / "best")).step == 3
    with pytest.raises(CheckpointError, match=r"checkpoint-000004 holds the checkpoint after step 3"):
        read((tmp_path / "best").rename(tmp_path / "checkpoint-000004"))


def test_a_new_run_sets_the_checkpoints_of_an_earlier_one_aside_whole(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert set_aside(root, None) is None
    saved(root, 2)
    aside = set_aside(root, None)
    assert aside == tmp_path / "checkpoints-old-1"
    assert read(aside / "checkpoint-000002").step == 2
    assert listed(root) == []
    saved(root, 1)
    assert set_aside(root, None) == tmp_path / "checkpoints-old-2"


def test_a_resumed_run_keeps_its_past_and_sets_the_future_of_another_aside(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    folders = [saved(root, step) for step in (2, 4, 6)]
    aside = set_aside(root, read(folders[1]))
    assert [step_of(p) for p in listed(root)] == [2, 4]
    assert aside is not None
    assert [step_of(p) for p in listed(aside)] == [6]
    assert set_aside(root, read(folders[1])) is None


def test_a_run_resumed_from_another_folder_keeps_nothing_that_lies_in_its_own(tmp_path: Path) -> None:
    other = saved(tmp_path / "other" / "checkpoints", 5)
    saved(tmp_path / "own" / "checkpoints", 3)
    assert set_aside(tmp_path / "own" / "checkpoints", read(other)) is not None
    assert listed(tmp_path / "own" / "checkpoints") == []
    assert read(other).step == 5


def test_settings_that_a_resumed_run_changes_are_reported_and_where_it_writes_is_not() -> None:
    before = {"seed": 1, "max_steps": 4, "actor_train": {"training_args": {"learning_rate": 1.0}}, "output_dir": "a"}
    now = {
        "seed": 2,
        "max_steps": 8,
        "actor_train": {"training_args": {"learning_rate": 0.5}},
        "output_dir": "b",
        "a_newer_key": 1,
    }
    assert differences(before, now) == [
        "$.actor_train.training_args.learning_rate was 1.0, is 0.5",
        "$.seed was 1, is 2",
    ]
    assert differences(before, before) == []
