"""The tensorboard logger: event files written with the `tensorboard` package alone."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from turnwise.contracts.logger import LoggerContext
from turnwise.data.trajectory import Trajectory
from turnwise_tensorboard.config import TensorboardConfig

RGB = 3


class TensorboardLogger:
    """Writes event files to `tensorboard/` below the run's folder; each process that logs begins a new file there."""

    def __init__(self, config: TensorboardConfig, context: LoggerContext) -> None:
        self._config = config
        self._folder = context.folder / "tensorboard"
        self._writer: EventFileWriter | None = None

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event with every metric; NaN is kept, TensorBoard marks it in the curve."""
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        """Trajectories are not logged here; the jsonl logger keeps them."""

    def artifact(self, step: int, name: str, path: Path) -> None:
        """A PNG or GIF file as an image; other files are passed over."""
        if not self._config.images:
            return
        encoded = path.read_bytes()
        size = image_size(encoded)
        if size is not None:
            image = Summary.Image(width=size[0], height=size[1], colorspace=RGB, encoded_image_string=encoded)
            self._add(
                Event(wall_time=time.time(), step=step, summary=Summary(value=[Summary.Value(tag=name, image=image)]))
            )

    def resume(self, step: int) -> None:
        """Mark a new start at `step`: TensorBoard then hides what earlier files hold for it and later."""
        self._add(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """Close the event file; may be called twice, and a later event begins a new file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, event: Event) -> None:
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self._folder))
        self._writer.add_event(event)
        # Every step: a killed run loses nothing.
        self._writer.flush()


def image_size(encoded: bytes) -> tuple[int, int] | None:
    """(width, height) from the header of a PNG or GIF file; None for anything else."""
    # PNG writes numbers with the highest byte first, GIF with the lowest.
    if encoded.startswith(b"\x89PNG\r\n\x1a\n") and len(encoded) >= 24:
        width, height = struct.unpack(">II", encoded[16:24])
        return width, height
    if encoded[:6] in (b"GIF87a", b"GIF89a") and len(encoded) >= 10:
        width, height = struct.unpack("<HH", encoded[6:10])
        return width, height
    return None
