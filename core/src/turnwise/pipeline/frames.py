"""Files for people: GIFs and texts of rendered episodes, and the dump of a step's trajectories."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.data.record import trajectory_record
from turnwise.data.trajectory import Trajectory
from turnwise.errors import MachineError

# Milliseconds for which a frame of a GIF is shown.
FRAME_MS = 500


def write(
    folder: Path,
    episodes: Mapping[tuple[str, int, int], Sequence[Any]],  # Any: what an environment's render() returned
    still: bool = False,
) -> Iterator[tuple[str, Path]]:
    """Write each episode's frames under `folder`: a GIF (or, `still`, one PNG a frame) of image frames, a text file of
    string frames.

    Yields (name, path) of each file. Raises MachineError without Pillow.
    """
    for (tag, group, member), frames in episodes.items():
        # A tag is a key of the YAML, and may hold what separates folders.
        name = f"{tag.replace(os.sep, '_')}-{group}-{member}"
        if not frames:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if all(isinstance(frame, str) for frame in frames):
            path = folder / f"{name}.txt"
            path.write_text("\n\n".join(frames) + "\n", encoding="utf-8")
            yield name, path
            continue
        pictures = [_picture(frame) for frame in frames]
        if still:
            for number, picture in enumerate(pictures):
                path = folder / f"{name}-{number:03d}.png"
                picture.save(path)
                yield f"{name}-{number:03d}", path
            continue
        path = folder / f"{name}.gif"
        pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=FRAME_MS, loop=0)
        yield name, path


def _picture(frame: Any) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MachineError(
            "frames need Pillow, not installed. Fix: pip install 'turnwise[render]', or leave render_save_dir out."
        ) from error
    return Image.fromarray(np.asarray(frame, np.uint8))


def dump(folder: Path, step: int, trajectories: Sequence[Trajectory]) -> Path:
    """Write a step's trajectories to `folder/step-<step>.jsonl`, one line each, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.jsonl"
    path.write_text("".join(json.dumps(trajectory_record(step, t)) + "\n" for t in trajectories))
    return path
