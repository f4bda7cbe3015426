"""What flows through a run: turns, trajectories, samples, and the columnar batch. numpy arrays, no torch."""

from turnwise.data.batch import Batch, Table, build_batch
from turnwise.data.rows import Rows, Update, UpdateResult
from turnwise.data.trajectory import Generation, Sample, StopReason, Trajectory, Turn

__all__ = [
    "Batch",
    "Generation",
    "Rows",
    "Sample",
    "StopReason",
    "Table",
    "Trajectory",
    "Turn",
    "Update",
    "UpdateResult",
    "build_batch",
]
