"""The tensorboard logger, read back with TensorBoard's own event accumulator."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from turnwise.contracts.logger import LoggerContext
from turnwise_tensorboard.config import TensorboardConfig
from turnwise_tensorboard.logger import TensorboardLogger, image_size

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000020000000108020000007b40e8dd0000000f49444154789c63f8cfc0c0c0f01f0004ff01ff2ad6b4a90000000049454e44ae426082"
)
GIF = b"GIF89a" + struct.pack("<HH", 5, 7) + bytes(3) + b";"


def make(folder: Path, **options: Any) -> TensorboardLogger:
    return TensorboardLogger(TensorboardConfig(**options), LoggerContext(folder))


def accumulated(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_scalars_come_back_with_step_value_and_nan(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.scalars(0, {"policy/loss": 0.5, "val/Lake/success": 1.0})
    logger.scalars(7, {"policy/loss": math.nan, "new": 2})
    events = accumulated(tmp_path)  # before close: every step is flushed
    loss = events.Scalars("policy/loss")
    assert [e.step for e in loss] == [0, 7]
    assert loss[0].value == 0.5
    assert math.isnan(loss[1].value)
    assert events.Scalars("new")[0].value == 2.0
    assert events.Scalars("val/Lake/success")[0].step == 0
    logger.close()
    logger.close()


def test_resume_hides_the_step_and_later(tmp_path: Path) -> None:
    first = make(tmp_path)
    for step in range(6):
        first.scalars(step, {"a": float(step)})
    first.close()
    second = make(tmp_path)
    second.resume(3)
    second.scalars(3, {"a": 30.0})
    second.close()
    assert [(e.step, e.value) for e in accumulated(tmp_path).Scalars("a")] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_png_is_an_image_and_other_files_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "frame.png").write_bytes(PNG)
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    logger = make(tmp_path)
    logger.artifact(2, "val/frame", tmp_path / "frame.png")
    logger.artifact(2, "notes", tmp_path / "notes.txt")
    logger.close()
    events = accumulated(tmp_path)
    (image,) = events.Images("val/frame")
    assert (image.step, image.width, image.height, image.encoded_image_string) == (2, 2, 1, PNG)
    assert events.Tags()["images"] == ["val/frame"]


def test_images_false_logs_none(tmp_path: Path) -> None:
    logger = make(tmp_path, images=False)
    logger.artifact(0, "frame", tmp_path / "is not read.png")
    logger.close()
    assert not (tmp_path / "tensorboard").exists()


def test_image_size_is_read_from_the_header() -> None:
    assert image_size(PNG) == (2, 1)
    assert image_size(GIF) == (5, 7)
    assert image_size(b"<svg/>") is None
    assert image_size(PNG[:12]) is None


def test_only_its_own_folder_is_written(tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.scalars(0, {"a": 1.0})
    logger.close()
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]


def test_neither_the_hooks_nor_the_logger_load_torch_or_tensorflow() -> None:
    code = (
        "import sys, turnwise_tensorboard; assert 'tensorboard' not in sys.modules; "
        "import turnwise_tensorboard.logger; print([m for m in ('torch', 'tensorflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
