"""Checkpoints are written whole into a temporary folder, made durable, and renamed; older ones are pruned or set
aside."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import CheckpointError
from turnwise.planning.resume import MANIFEST, PREFIX, Checkpoint, file_digest, listed, manifest_digest, step_of

TEMPORARY = ".tmp-"


async def save(
    root: Path,
    step: int,
    state: Mapping[str, Any],
    write: Callable[[Path], Awaitable[None]],  # Any: JSON data
) -> Path:
    """Write `root/checkpoint-<step>`: `write` lets the roles write into a temporary folder, then it is fsynced and
    renamed.

    Whatever goes wrong, no half checkpoint is left and older ones stay whole. Raises CheckpointError (disk full, not
    writable).
    """
    final = root / f"{PREFIX}{step:06d}"
    temporary = root / f"{TEMPORARY}{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(f"{TEMPORARY}*"):  # by a run that was killed while it saved
            shutil.rmtree(left)
        temporary.mkdir()
        await write(temporary)
        files = await asyncio.to_thread(_files, temporary)
        # As it will be read: JSON has text for keys alone.
        content = json.loads(json.dumps({"step": step, "state": state, "files": files}))
        content["sha256"] = manifest_digest(step, content["state"], content["files"])
        (temporary / MANIFEST).write_text(json.dumps(content, indent=1))
        _make_durable(temporary)
        # rename does not replace a folder that holds something.
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
        # The rename is an entry of this folder, and durable only with it.
        _sync(root)
    except (OSError, CheckpointError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise CheckpointError(
            f"{final.name} could not be written to {root}: {reason}. Older checkpoints are untouched. Fix: free space"
            " or choose another output_dir."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def prune(root: Path, keep: int | None) -> None:
    """Delete all but the newest `keep` checkpoints, and those that another process holds
    (turnwise.planning.resume.held)."""
    for old in listed(root)[: -keep or None] if keep else []:
        with (
            (old / MANIFEST).open() as file,
            contextlib.suppress(BlockingIOError),
        ):  # somebody reads it: it goes next time
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old)


def set_aside(root: Path, start: Checkpoint | None) -> Path | None:
    """Move the checkpoints that are not part of the run which begins at `start` (None: anew) to a folder beside `root`,
    and return it.

    Left there, `the newest` would mean one of another run. Those before `start` in its own folder are its past and
    stay.
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


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """Name → size and digest of every file."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": file_digest(path)} for path in paths}


def _make_durable(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    # A folder opens for reading only, which is all that fsync needs.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
