"""Checkpoints: written whole into a temporary folder, made durable, renamed; verified before they are read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise.errors import CheckpointError

PREFIX = "checkpoint-"
MAY_CHANGE = frozenset(
    {"exp_name", "output_dir", "logging_dir", "render_save_dir", "rollout_dump_dir", "resume_from_checkpoint", "max_steps", "save_steps", "plugins"}
    | {"logging_steps", "eval_steps", "max_ckpt_to_keep", "track_with", "vars", "baselines"}
)
"""Top-level keys that a resumed run may change without a word."""
TEMPORARY = ".tmp-"
MANIFEST = "manifest.json"


@frozen
class Checkpoint:
    """A complete checkpoint: its folder, the number of finished pipeline steps, and the pipeline's own state."""

    folder: Path
    step: int
    state: Mapping[str, Any]


async def save(root: Path, step: int, state: Mapping[str, Any], write: Callable[[Path], Awaitable[None]]) -> Path:
    """Write `root/checkpoint-<step>`: `write` lets the roles write into a temporary folder, then it is fsynced and renamed.

    Whatever goes wrong, no half checkpoint is left and older ones stay whole. Raises CheckpointError (disk full, not writable).
    """
    final = root / f"{PREFIX}{step:06d}"
    temporary = root / f"{TEMPORARY}{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(f"{TEMPORARY}*"):  # by a run that was killed while it saved
            shutil.rmtree(left)
        temporary.mkdir()
        await write(temporary)
        files = {str(p.relative_to(temporary)): p.stat().st_size for p in sorted(temporary.rglob("*")) if p.is_file()}
        (temporary / MANIFEST).write_text(json.dumps({"step": step, "state": state, "files": files}, indent=1))
        _make_durable(temporary)
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
        _sync(root)
    except (OSError, CheckpointError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise CheckpointError(
            f"{final.name} could not be written to {root}: {reason}. Older checkpoints are untouched. Fix: free space or choose another output_dir."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def read(folder: Path) -> Checkpoint:
    """A verified checkpoint. Raises CheckpointError if it is missing, incomplete or cut short."""
    manifest = folder / MANIFEST
    fix = "Fix: name another checkpoint, or resume_from_checkpoint: false to start anew."
    if not manifest.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}. {fix}")
    try:
        content = json.loads(manifest.read_text())
        files, step, state = dict(content["files"]), int(content["step"]), content["state"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest} is cut short or not a manifest ({error}). {fix}") from error
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder} is incomplete: {name} is missing. {fix}")
        if path.stat().st_size != size:
            raise CheckpointError(f"checkpoint {folder} is cut short: {name} has {path.stat().st_size} bytes of {size}. {fix}")
    return Checkpoint(folder, step, state)


def listed(root: Path) -> list[Path]:
    """All checkpoint folders under `root`, oldest first."""
    found = root.glob(f"{PREFIX}*") if root.is_dir() else ()
    return sorted((p for p in found if p.name.removeprefix(PREFIX).isdecimal() and p.is_dir()), key=step_of)


def to_resume(setting: bool | str, root: Path) -> Checkpoint | None:
    """The checkpoint that `resume_from_checkpoint` means: none, the newest under `root`, or the named folder."""
    if setting is False:
        return None
    if setting is True:
        found = listed(root)
        return read(found[-1]) if found else None
    return read(Path(setting))


def prune(root: Path, keep: int | None) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for old in listed(root)[: -keep or None] if keep else []:
        shutil.rmtree(old)


def set_aside(root: Path, start: Checkpoint | None) -> Path | None:
    """Move the checkpoints that are not part of the run which begins at `start` (None: anew) to a folder beside `root`, and return it.

    Left there, `the newest` would mean one of another run. Those before `start` in its own folder are its past and stay.
    """
    past = start.step if start is not None and start.folder.resolve().parent == root.resolve() else -1
    foreign = [folder for folder in listed(root) if step_of(folder) > past]
    if not foreign:
        return None
    number = 1
    while (aside := root.with_name(f"{root.name}-old-{number}")).exists():
        number += 1
    aside.mkdir()
    for folder in foreign:
        os.rename(folder, aside / folder.name)
    return aside


def _make_durable(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "$") -> list[str]:
    """Settings that a resumed run changes, one line each; where it writes, and how long it runs, may change."""
    lines = []
    for key in before.keys() & now.keys() if path == "$" else before.keys() | now.keys():
        old, new = before.get(key), now.get(key)
        if old == new or (path == "$" and key in MAY_CHANGE):
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, f"{path}.{key}")
        else:
            lines.append(f"{path}.{key} was {old!r}, is {new!r}")
    return sorted(lines)


def step_of(folder: Path) -> int:
    """The number of finished steps that a checkpoint's folder name tells."""
    return int(folder.name.removeprefix(PREFIX))
