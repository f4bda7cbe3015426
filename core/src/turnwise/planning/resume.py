"""The checkpoint that a run goes on from: found, verified before it is read, and compared with what the run is now."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise.config.convert import structure
from turnwise.config.problems import at
from turnwise.config.schema import RunConfig, TrainingArgs
from turnwise.errors import CheckpointError, ConfigError, one_line
from turnwise.planning.schedules import learning_rate, schedule_of

Plain = Mapping[str, Any]
"""A resolved configuration as a checkpoint holds it: of this version of Turnwise or of an older one."""

PREFIX = "checkpoint-"
MANIFEST = "manifest.json"
# Where things are written, how often, and how long the run is: nothing that a step computes. A longer run changes
# rates, which `rate_jumps` says.
MAY_CHANGE = frozenset(
    {
        "exp_name",
        "output_dir",
        "logging_dir",
        "render_save_dir",
        "rollout_dump_dir",
        "resume_from_checkpoint",
        "async_generation_ratio",
        "max_steps",
        "save_steps",
        "plugins",
    }
    | {"logging_steps", "eval_steps", "max_ckpt_to_keep", "track_with", "vars", "baselines"}
)
"""Top-level keys that a resumed run may change without a word."""


@frozen
class Checkpoint:
    """A complete checkpoint: its folder, the number of finished pipeline steps, and the pipeline's own state."""

    folder: Path
    step: int
    state: Mapping[str, Any]


FIX = "Fix: name another checkpoint, or resume_from_checkpoint: false to start anew."


def read(folder: Path, *, contents: bool = True) -> Checkpoint:
    """A verified checkpoint. Raises CheckpointError if it is missing, incomplete, cut short or damaged.

    `contents` False compares names and sizes alone, which takes no time; a flipped bit shows in the digests only.
    """
    manifest = folder / MANIFEST
    # The manifest is written last, so a folder without one was never whole.
    if not manifest.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST}. {FIX}")
    try:
        content = json.loads(manifest.read_text())
        files = {str(name): (int(one["size"]), str(one["sha256"])) for name, one in content["files"].items()}
        step, state = int(content["step"]), dict(content["state"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{manifest} is cut short or not a manifest ({one_line(error)}). {FIX}") from error
    if not files:
        raise CheckpointError(f"{manifest} lists no file. {FIX}")
    # An earlier version wrote none.
    if content.get("sha256", whole := manifest_digest(step, state, content["files"])) != whole:
        raise CheckpointError(f"{manifest} is damaged: it is not what was written. {FIX}")
    named = folder.name.removeprefix(PREFIX)
    if folder.name.startswith(PREFIX) and named.isdecimal() and int(named) != step:
        raise CheckpointError(f"{folder} holds the checkpoint after step {step}, not that of its name. {FIX}")
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder} is incomplete: {name} is missing. {FIX}")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"checkpoint {folder} is cut short: {name} has {path.stat().st_size} bytes of {size}. {FIX}"
            )
        if contents and file_digest(path) != digest:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: the contents of {name} are not what was written. {FIX}"
            )
    return Checkpoint(folder, step, state)


def manifest_digest(step: int, state: Any, files: Any) -> str:  # Any: JSON data
    """The sha256 of what a manifest says."""
    return hashlib.sha256(json.dumps([step, state, files], sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """The sha256 of a file, against damage; it is no protection from who can write the manifest too."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def held(folder: Path | None, root: Path) -> Iterator[Checkpoint]:
    """The verified checkpoint `folder` (None: the newest under `root`), which the run that writes there does not prune
    meanwhile.

    Raises CheckpointError as `read`, and where there is none.
    """
    while True:
        if folder is None and not listed(root):
            raise CheckpointError(f"{root} holds no checkpoint. Fix: train first, or name a model folder.")
        wanted = listed(root)[-1] if folder is None else folder
        try:
            file = (wanted / MANIFEST).open()
        except OSError:
            if folder is None and wanted not in listed(root):
                continue  # pruned since it was listed: there is a newer one
            read(wanted)  # says what is wrong with it
            raise
        with file:
            # Waits while it is being pruned, and then it is gone.
            fcntl.flock(file, fcntl.LOCK_SH)
            if folder is None and not wanted.is_dir():
                continue
            yield read(wanted)
            return


def listed(root: Path) -> list[Path]:
    """All checkpoint folders under `root`, oldest first."""
    # Only whole ones: one that is being written has another name until it is done.
    found = root.glob(f"{PREFIX}*") if root.is_dir() else ()
    return sorted((p for p in found if p.name.removeprefix(PREFIX).isdecimal() and p.is_dir()), key=step_of)


def to_resume(setting: bool | str, root: Path, *, contents: bool = True) -> Checkpoint | None:
    """The checkpoint that `resume_from_checkpoint` means: none, the newest under `root`, or the named folder; verified
    as in `read`."""
    if setting is False:
        return None
    if setting is True:
        found = listed(root)
        return read(found[-1], contents=contents) if found else None
    return read(Path(setting), contents=contents)


def differences(before: Plain, now: Plain, path: str = "$") -> list[str]:
    """Settings that a resumed run changes, one line each; where it writes, and how long it runs, may change."""
    lines = []
    # At the top a key of only one side is of another version of the schema, not a change of the user's.
    for key in before.keys() & now.keys() if path == "$" else before.keys() | now.keys():
        old, new = before.get(key), now.get(key)
        if old == new or (path == "$" and key in MAY_CHANGE):
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, f"{path}.{key}")
        else:
            lines.append(f"{path}.{key} was {old!r}, is {new!r}")
    return sorted(lines)


def rate_jumps(before: Plain, now: RunConfig, step: int) -> list[str]:
    """One line for each trained role whose learning rate at `step` is another because max_steps is: schedules are
    functions of the whole length, so that a longer run raises again what an almost finished one had let fall."""
    length = before.get("max_steps")
    lines: list[str] = []
    if not isinstance(length, int) or length == now.max_steps:
        return lines
    for name in ("actor_train", "critic"):
        role = getattr(now, name)
        # What an older version, or a reference to the environment, has left there is compared with nothing.
        args, _ = structure(TrainingArgs, at(before, (name, "training_args"), {}))
        if role is None or args is None:
            continue
        try:
            old, new = _rate(args, length, step), _rate(role.training_args, now.max_steps, step)
        except ConfigError:
            continue
        if not math.isclose(old, new, rel_tol=1e-9):
            lines.append(
                f"$.max_steps was {length}, is {now.max_steps}: the learning rate of {name} at step {step} is {new:.4g},"
                f" and was {old:.4g} there (lr_scheduler_type {role.training_args.lr_scheduler_type})"
            )
    return lines


def _rate(args: TrainingArgs, max_steps: int, step: int) -> float:
    return learning_rate(args.learning_rate, schedule_of(args, max_steps), step, 0, 1, max_steps)


# Any: two configurations as they were written
def differences_ahead(before: Mapping[str, Any], now: Mapping[str, Any], queued: bool) -> list[str]:
    """What other settings mean for episodes that are played ahead of the weights, one line each. `queued`: whether the
    checkpoint holds any."""
    ratio, was = now.get("async_generation_ratio", 0), before.get("async_generation_ratio", 0)
    lines = []
    if ratio < was:
        rest = ": what was played further ahead is trained first" if queued else ""
        lines.append(f"async_generation_ratio was {was}, is {ratio}{rest}")
    elif ratio > was:
        lines.append(f"async_generation_ratio was {was}, is {ratio}: no longer bit for bit the run that was saved")
    steps, planned = now.get("max_steps", 0), before.get("max_steps", 0)
    if ratio and was and steps > planned:
        lines.append(
            f"max_steps was {planned}, is {steps}: nothing was played past it, so the run is no longer bit for bit that"
            " of one which was longer from the start"
        )
    return lines


def step_of(folder: Path) -> int:
    """The number of finished steps that a checkpoint's folder name gives."""
    return int(folder.name.removeprefix(PREFIX))
