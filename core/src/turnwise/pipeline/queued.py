"""The episodes that were played and not yet trained, as a file of a checkpoint: columns and JSON, no pickle."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.data.exact import decode, encode
from turnwise.errors import CheckpointError, one_line

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
        # Opened here: numpy leaves the file of a broken archive open.
        with (folder / FILE).open("rb") as raw, np.load(raw) as file:
            parts = [file[name] for name in ("record", "buffer")]
        if not all(part.dtype == np.uint8 and part.ndim == 1 for part in parts):
            raise ValueError("its arrays are not bytes")
        state: dict[str, Any] = decode(*(part.tobytes() for part in parts))
        if not isinstance(state, dict) or not isinstance(state.get("queue"), list):
            raise ValueError("it holds no queue of groups")
        if not all(isinstance(group, dict) for group in state["queue"]):
            raise ValueError("its queue holds something else than groups")
        return state
    # Whatever it is: of a damaged file zipfile, zlib and numpy's reader of headers each raise errors of their own.
    except Exception as error:
        raise CheckpointError(
            f"{folder / FILE} cannot be read ({one_line(error)}). Fix: resume from another checkpoint."
        ) from error
