"""The episodes that were played and not yet trained, as a file of a checkpoint: columns and JSON, no pickle."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from turnwise.data.exact import decode, encode
from turnwise.errors import CheckpointError

log = logging.getLogger("turnwise")

FILE = "rollouts.npz"


def write(folder: Path, state: dict[str, Any]) -> None:  # Any: as RolloutSource.state
    """Write a state into a checkpoint's folder. Steps that hold what cannot be written exactly are left out, with a
    warning: they will be played again."""
    unwritable: dict[int, str] = {}
    for group in state["queue"]:
        try:
            encode(group)
        except TypeError as error:
            unwritable.setdefault(group["step"], str(error).removeprefix("it"))
    for step, reason in unwritable.items():
        log.warning("the episodes of step %d are not saved, a resumed run plays them again: %s", step, reason)
    kept = [group for group in state["queue"] if group["step"] not in unwritable]
    record, buffer = encode(state | {"queue": kept})
    with (folder / FILE).open("wb") as file:
        np.savez(file, record=np.frombuffer(record, np.uint8), buffer=np.frombuffer(buffer, np.uint8))


def read(folder: Path) -> dict[str, Any]:  # Any: as RolloutSource.state
    """What `write` wrote. Raises CheckpointError."""
    try:
        with (folder / FILE).open("rb") as raw, np.load(raw) as file:
            state: dict[str, Any] = decode(file["record"].tobytes(), file["buffer"].tobytes())
            return state
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise CheckpointError(
            f"{folder / FILE} cannot be read ({type(error).__name__}: {error}). Fix: resume from another checkpoint."
        ) from error
