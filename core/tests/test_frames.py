"""Rendered episodes as files: GIFs, single PNGs, texts; and the dump of a step's trajectories."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.errors import MachineError
from turnwise.pipeline import frames
from turnwise.testing.synthetic import trajectories


def pictures(count: int) -> list[np.ndarray]:
    return [np.full((4, 6, 3), 40 * k, np.uint8) for k in range(count)]


def test_text_frames_become_a_text_file(tmp_path: Path) -> None:
    ((name, path),) = frames.write(tmp_path / "new", {("Lake", 3, 1): ["S…\n.G", ".S\n.G"]})
    assert (name, path.name) == ("Lake-3-1", "Lake-3-1.txt")
    assert path.read_text(encoding="utf-8") == "S…\n.G\n\n.S\n.G\n"


def test_image_frames_become_a_gif_of_all_of_them(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    ((name, path),) = frames.write(tmp_path, {("a/b", 0, 0): pictures(4)})
    assert (name, path.name) == ("a_b-0-0", "a_b-0-0.gif")
    with image.open(path) as gif:
        assert (gif.n_frames, gif.size, gif.info["duration"]) == (4, (6, 4), frames.FRAME_MS)


def test_still_frames_are_one_png_each_without_loss(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    made = list(frames.write(tmp_path, {("T", 1, 2): pictures(3)}, still=True))
    assert [(name, path.name) for name, path in made] == [(f"T-1-2-{k:03d}", f"T-1-2-{k:03d}.png") for k in range(3)]
    with image.open(made[2][1]) as png:
        np.testing.assert_array_equal(np.asarray(png), pictures(3)[2])


def test_episodes_without_frames_leave_no_file(tmp_path: Path) -> None:
    assert list(frames.write(tmp_path / "frames", {("T", 0, 0): []})) == []
    assert not (tmp_path / "frames").exists()


def test_images_without_pillow_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        MachineError,
        match=(
            r"^frames need Pillow, not installed\. Fix: pip install 'turnwise\[render\]', or leave render_save_dir"
            r" out\.$"
        ),
    ):
        list(frames.write(tmp_path, {("T", 0, 0): pictures(1)}))


def test_a_dump_holds_every_trajectory_of_the_step_whole(tmp_path: Path) -> None:
    played = trajectories(2, 2)
    path = frames.dump(tmp_path / "dump", 12, played)
    assert path.name == "step-000012.jsonl"
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["group"], line["member"], len(line["turns"])) for line in lines] == [
        (12, t.group, t.member, len(t.turns)) for t in played
    ]
    assert lines[0]["turns"][0]["response_ids"] == played[0].turns[0].response_ids.tolist()
